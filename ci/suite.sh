#!/usr/bin/env bash
# Another suite of the distribution this machine already uses, from the archive it already uses, without touching its
# configuration: everything apt needs lies in a private folder.
#
#   ci/suite.sh own                      print this machine's suite
#   ci/suite.sh sources SUITE            print one-line source entries for SUITE
#   ci/suite.sh unpack SUITE DIR PKG…    download the packages (not their dependencies) and unpack them into DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
state=$(realpath -m "${KIT_STATE:-.state}")

die() {
  echo "error: $*" >&2
  exit 1
}

own_suite() {
  # shellcheck source=/dev/null
  (. /etc/os-release && [ "$ID" = debian ] && echo "$VERSION_CODENAME") || die "this machine is not Debian"
}

# The entries that apt itself knows, with our own suite's name exchanged in each: bookworm-security → trixie-security.
sources() {
  local suite=$1 own keyring=/usr/share/keyrings/debian-archive-keyring.gpg options=""
  own=$(own_suite)
  [ ! -e "$keyring" ] || options="[signed-by=$keyring] "
  # shellcheck disable=SC2016  # apt expands these, not the shell
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    awk -v own="$own" -v suite="$suite" -v options="$options" '
      $3 == "main" && ($2 == own || index($2, own "-") == 1) {
        sub("^" own, suite, $2)
        print "deb " options $1, $2, $3
      }' | sort -u
}

# Set the array apt_options to those of a private apt state for SUITE, with fresh lists (once an hour).
private_apt() {
  local suite=$1 root=$state/apt/$1
  mkdir -p "$root"/{lists,cache/archives/partial}
  sources "$suite" >"$root/sources.list.new"
  [ -s "$root/sources.list.new" ] || die "apt knows no archive of this distribution: check /etc/apt/sources.list.d"
  apt_options=(
    -o "Dir::Etc::sourcelist=$root/sources.list" -o "Dir::Etc::sourceparts=/dev/null"
    -o "Dir::State::lists=$root/lists" -o "Dir::Cache=$root/cache"
    -o "APT::Default-Release=" -o "APT::Sandbox::User=root"
    -o "Acquire::Retries=1" -o "Acquire::http::Timeout=20" -o "Acquire::https::Timeout=20"
  )
  if ! cmp -s "$root/sources.list.new" "$root/sources.list" || [ -z "$(find "$root/fresh" -mmin -60 2>/dev/null)" ]; then
    mv "$root/sources.list.new" "$root/sources.list"
    # An unreachable archive is an error at once, not a warning followed by others.
    logged "$root/apt.log" apt-get "${apt_options[@]}" -o APT::Update::Error-Mode=any -qq update
    touch "$root/fresh"
  else
    rm "$root/sources.list.new"
  fi
}

# logged FILE PROGRAM…: its output goes to the file; a failure is reported in one line
logged() {
  local said
  if ! "${@:2}" >"$1" 2>&1; then
    said=$(grep -m1 '^E:' "$1" || tail -1 "$1")
    die "${said#E: }: see that this machine reaches its package archive, and $1"
  fi
}

unpack() {
  local suite=$1 into=$2 debs
  shift 2
  private_apt "$suite"
  debs=$(mktemp -d)
  # shellcheck disable=SC2064  # the folder's name as it is now
  trap "rm -rf '$debs'" EXIT
  (cd "$debs" && logged "$state/apt/$suite/apt.log" apt-get "${apt_options[@]}" -qq download "$@")
  mkdir -p "$into"
  for deb in "$debs"/*.deb; do
    dpkg -x "$deb" "$into"
  done
}

case ${1-} in
  own) own_suite ;;
  sources) sources "${2:?suite}" ;;
  unpack) unpack "${@:2}" ;;
  *) die "usage: ci/suite.sh own | sources SUITE | unpack SUITE DIR PACKAGE…" ;;
esac

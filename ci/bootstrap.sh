#!/usr/bin/env bash
# Prepare this machine for the pipeline, and change nothing else.
#
#   ci/bootstrap.sh          say what is missing; install nothing into the system
#   ci/bootstrap.sh --yes    install the missing system packages too (so does CI=true)
#   ci/bootstrap.sh [--yes] --slurm   what a local Slurm needs (ci/slurm/local.sh), and nothing else
#   ci/bootstrap.sh [--yes] --pages   what tests of pages need (ci/pages-env.sh), and nothing else
#
# Programs that run as services (Docker's engine, the registry) are never installed into the system: their packages are
# unpacked under .state and run from there. A Docker that is already here is used if it can do what the build needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
state=$(realpath -m "${KIT_STATE:-.state}")
yes=${CI:-}
other=
for word in "$@"; do
  case $word in
    --yes) yes=true ;;
    --slurm | --pages) other=$word ;;
  esac
done

# program or file → Debian package that brings it
needs=(
  "/bin/busybox busybox-static"
  "curl curl"
  "git git"
  "make make"
  "mksquashfs squashfs-tools"
  "mmdebstrap mmdebstrap"
  "shellcheck shellcheck"
  "skopeo skopeo"
  "ss iproute2"
  "tar2sqfs squashfs-tools-ng"
  "umoci umoci"
  "xz xz-utils"
  "zstd zstd"
  "/etc/ssl/certs/ca-certificates.crt ca-certificates"
  "/usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring"
)

# What a local Slurm needs. squashfuse and runc are for containers of users without root.
slurm_needs=(
  "ip iproute2"
  "munged munge"
  "nsenter util-linux"
  "runc runc"
  "sbatch slurm-client"
  "slurmctld slurmctld"
  "slurmd slurmd"
  "squashfuse squashfuse"
)
# A browser draws the pages that tests look at.
pages_needs=("chromium chromium" "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf fonts-dejavu-core")
case $other in
  --slurm) needs=("${slurm_needs[@]}") ;;
  --pages) needs=("${pages_needs[@]}") ;;
esac

# An unreachable archive is an error at once, not a warning followed by others.
apt_options=(-o APT::Update::Error-Mode=any -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)

die() {
  echo "error: $*" >&2
  exit 1
}

is_debian() {
  [ -r /etc/debian_version ] && command -v apt-get >/dev/null
}

missing_packages() {
  local need
  for need in "${needs[@]}"; do
    command -v "${need% *}" >/dev/null 2>&1 || [ -e "${need% *}" ] || echo "${need#* }"
  done
  python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || echo python3-venv
}

install_system_packages() {
  local packages
  mapfile -t packages < <(missing_packages)
  [ ${#packages[@]} -gt 0 ] || return 0
  is_debian || die "missing here: ${packages[*]} (names as in Debian): install them with this system's package manager"
  if [ "$yes" != true ]; then
    die "missing here: ${packages[*]}: run 'ci/bootstrap.sh --yes' to install these Debian packages, or do so yourself"
  fi
  [ "$(id -u)" = 0 ] || die "cannot install ${packages[*]} without root: run ci/bootstrap.sh --yes as root once"
  echo "Installing Debian packages: ${packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  if [ -z "$(find /var/lib/apt/lists -name '*_Packages*' -mmin -1440 -print -quit 2>/dev/null)" ]; then
    logged "apt-get update" apt-get "${apt_options[@]}" -qq update
  fi
  logged "apt-get install" apt-get "${apt_options[@]}" -qq install --no-install-recommends "${packages[@]}"
}

# logged TITLE PROGRAM…: its output goes to a file; a failure is reported in one line
logged() {
  local log=$state/apt-install.log said
  if ! "${@:2}" >"$log" 2>&1; then
    said=$(grep -m1 '^E:' "$log" || tail -1 "$log")
    die "$1 failed (${said#E: }): see that this machine reaches its package archive, and $log"
  fi
}

# What the build needs of a Docker: buildx, and the containerd image store (for OCI output and digests).
can_build() {
  command -v docker >/dev/null && docker buildx version >/dev/null 2>&1 &&
    timeout 20 docker info --format '{{json .DriverStatus}}' 2>/dev/null | grep -q 'io.containerd.snapshotter'
}

choose_engine() {
  if [ "${KIT_ENGINE:-}" != own ] && can_build; then
    echo host >"$state/engine.new"
  else
    is_debian || die "the Docker here has no buildx or no containerd image store: enable 'containerd-snapshotter' in it"
    unpack_once engine "${KIT_DOCKER_SUITE:-trixie}" docker.io docker-cli docker-buildx containerd
    echo own >"$state/engine.new"
  fi
  mv "$state/engine.new" "$state/engine.kind"
}

# unpack_once FOLDER SUITE PACKAGE…
unpack_once() {
  local folder=$state/$1
  [ ! -e "$folder/.complete" ] || return 0
  rm -rf "$folder"
  echo "Unpacking into ${folder#"$PWD"/}: ${*:3} ($2)"
  ci/suite.sh unpack "$2" "$folder" "${@:3}"
  touch "$folder/.complete"
}

version=1 # as in kit/services.py
if [ -e "$state/version" ] && [ "$(cat "$state/version")" != "$version" ]; then
  die "$state is of another version of the kit: remove it with ./build.py clean --all"
fi
mkdir -p "$state"
echo "$version" >"$state/version"
install_system_packages
[ -z "$other" ] || exit 0
choose_engine
if is_debian; then
  unpack_once runtime "$(ci/suite.sh own)" runc docker-registry
fi

#!/usr/bin/env bash
# What `make test` runs, part by part, with the minutes that each took and may take.
#
#   ci/test.sh               every part but `full`, up to the first that fails
#   ci/test.sh static unit   these parts
#
# It first installs the Debian packages that are missing, and prints their names (ci/bootstrap.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=(static unit road stations slurm inside faults)
# Seconds that each part takes at most on a fast machine of 2 processors. All parts of `make test` together, those to come
# included, stay below 38 minutes there.
declare -A budget=([prepare]=110 [static]=15 [unit]=60 [road]=275 [stations]=380 [slurm]=170 [inside]=460 [faults]=800 [full]=9000)
build=(.venv/bin/python build.py)
gym=$(realpath -m "${KIT_STATE:-.state}")/gym # made by ci/gym-env.sh
pytest=(env -u KEEP .venv/bin/python -m pytest -q)
summary=()

# What the parts need: packages, tools, the Python environment and, for `road`, the inputs; so that a missing network is
# reported at once, and not after minutes.
prepare() {
  ci/bootstrap.sh --yes
  ci/python-env.sh
  if [[ " $* " =~ " slurm "|" full " ]]; then
    ci/bootstrap.sh --yes --slurm
  fi
  if [[ " $* " == *" road "* ]]; then
    ./build.py fetch
  fi
}

static() {
  .venv/bin/python -m ruff check .
  .venv/bin/python -m ruff format --check .
  .venv/bin/python -m mypy
  .venv/bin/lint-imports --no-logo --no-cache
  git ls-files -z -- '*.sh' ci/slurm/ray.sub .ci/run 'tests/slurm/stand_ins/*' | xargs -0 shellcheck
}

unit() {
  "${pytest[@]}" -m 'not sqsh and not image and not road and not slurm and not full'
}

# The whole pipeline, from locked inputs to a verified release, as the README has it.
road() {
  local -x MAKEFLAGS=--no-print-directory
  make image push LEAN="${CI:+--lean}"
  make sqsh
  make functional
  make verify
}

# Tests of single stages with real components: most with tiny inputs, some with the release that `road` made.
stations() {
  "${pytest[@]}" -m '(sqsh or image) and not slurm and not full'
}

# Jobs of an ordinary user on a real Slurm of two nodes.
slurm() {
  "${pytest[@]}" --durations=0 -m 'slurm and not full'
}

# Longer matrices: `make test-full` alone runs them.
full() {
  "${pytest[@]}" -m full
  ci/gym-env.sh
  in_image fault-tests.sh full
  make demo
}

# The tests of what runs in the image, in the image.
inside() {
  in_image image-tests.sh
}

# Whole runs with faults injected.
faults() {
  in_image fault-tests.sh
}

in_image() {
  local mounts=(--mount "$PWD/tests:/src/tests:ro" --mount "$PWD/functional:/src/functional:ro")
  mounts+=(--mount "$PWD/pyproject.toml:/src/pyproject.toml:ro" --mount "$PWD/ci:/src/ci:ro")
  if [ -d "$gym" ]; then
    mounts+=(--mount "$gym:/opt/gym:ro" --env NEMO_GYM=/opt/gym)
  fi
  "${build[@]}" run "${mounts[@]}" --network none -- bash "/src/ci/$1" "${@:2}"
}

main() {
  local part parts=("${@:-${all[@]}}")
  for part in "${parts[@]}"; do
    [[ " ${all[*]} full " == *" $part "* ]] || die "there is no part '$part': choose of ${all[*]} full"
    [[ "$part" =~ ^(static|unit)$ || $(id -u) == 0 ]] || die "the part '$part' needs root: run it as root"
  done
  trap finish EXIT
  timed prepare "${parts[@]}"
  machine=$(.venv/bin/python ci/fixed_work.py)
  echo "$machine"
  for part in "${parts[@]}"; do
    timed "$part"
  done
}

die() {
  echo "error: $*" >&2
  exit 2
}

# A part runs in a shell of its own, because `set -e` does not hold in a function whose status is asked for.
timed() {
  local started=$SECONDS status=0 took
  echo "== $1"
  "$BASH" ci/test.sh "only-$1" "${@:2}" || status=$?
  took=$((SECONDS - started))
  summary+=("$(line "$1" $took "${budget[$1]}"), status $status")
  return $status
}

# line PART SECONDS BUDGET
line() {
  local over=""
  [ "$2" -le "$3" ] || over=", over"
  printf '%-9s %3d min %02d s of %2d min %02d s%s' "$1" $(($2 / 60)) $(($2 % 60)) $(($3 / 60)) $(($3 % 60)) "$over"
}

finish() {
  local status=$?
  if [ -z "${KEEP:-}" ] && [ -x .venv/bin/python ]; then
    "${build[@]}" services stop >/dev/null 2>&1 || true
  fi
  printf '%s\n' "" "${summary[@]}" "$(line total $SECONDS $((38 * 60)))" "${machine:-}"
  exit $status
}

case ${1:-} in
  only-*) "${1#only-}" "${@:2}" ;;
  *) main "$@" ;;
esac

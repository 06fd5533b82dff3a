#!/usr/bin/env bash
# What `make test` runs, part by part, with the minutes that each took and may take.
#
#   ci/test.sh               every part but `full`, up to the first that fails
#   ci/test.sh static unit   these parts
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=(static unit road stations inside faults)
declare -A budget=([static]=2 [unit]=3 [road]=25 [stations]=5 [inside]=10 [faults]=25 [full]=40)
build=(.venv/bin/python build.py)
pytest=(env -u KEEP .venv/bin/python -m pytest -q --ignore tests/engine --ignore tests/faults --ignore tests/runtime --ignore tests/suite_math)
summary=()

static() {
  .venv/bin/python -m ruff check .
  .venv/bin/python -m ruff format --check .
  .venv/bin/python -m mypy
  git ls-files -z -- '*.sh' .ci/run | xargs -0 shellcheck
}

unit() {
  "${pytest[@]}" -m 'not sqsh and not image and not road and not full'
}

road() {
  "${build[@]}" image ${CI:+--lean}
  "${build[@]}" push
  "${build[@]}" sqsh
  "${build[@]}" functional --name "${NAME:-cpu}"
  "${build[@]}" verify
}

# The stations with real components and tiny inputs, and some with the road's own.
stations() {
  "${pytest[@]}" -m '(sqsh or image) and not full'
}

# Longer matrices: `make test-full` alone runs them.
full() {
  "${pytest[@]}" -m full
}

# The tests of what runs in the image, in the image.
inside() {
  in_image image-tests.sh
}

# Whole runs that are hurt on purpose.
faults() {
  in_image fault-tests.sh
}

in_image() {
  local mounts=(--mount "$PWD/tests:/src/tests:ro" --mount "$PWD/functional:/src/functional:ro")
  mounts+=(--mount "$PWD/pyproject.toml:/src/pyproject.toml:ro" --mount "$PWD/ci:/src/ci:ro")
  "${build[@]}" run "${mounts[@]}" --network none -- bash "/src/ci/$1"
}

main() {
  local part parts=("${@:-${all[@]}}")
  for part in "${parts[@]}"; do
    [ -n "${budget[$part]:-}" ] || { echo "error: there is no part '$part': choose of ${all[*]}" >&2 && exit 2; }
  done
  trap finish EXIT
  for part in "${parts[@]}"; do
    timed "$part"
  done
}

# A part runs in a shell of its own, because `set -e` does not hold in a function whose status is asked for.
timed() {
  local started=$SECONDS status=0 took
  echo "== $1"
  "$BASH" ci/test.sh "only-$1" || status=$?
  took=$((SECONDS - started))
  summary+=("$(printf '%-9s %3d min %02d s of %2d min, status %d' "$1" $((took / 60)) $((took % 60)) "${budget[$1]}" $status)")
  return $status
}

finish() {
  local status=$?
  [ -n "${KEEP:-}" ] || "${build[@]}" services stop >/dev/null 2>&1 || true
  printf '%s\n' "" "${summary[@]}"
  exit $status
}

case ${1:-} in
  only-*) "${1#only-}" ;;
  *) main "$@" ;;
esac

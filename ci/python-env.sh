#!/usr/bin/env bash
# Make .venv from lockfiles/kit.txt. Takes uv from PATH; where there is none, from the package index with pip, into
# .state, by the machine's own pip configuration and with the hashes of the lock.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
state=${KIT_STATE:-.state}

environment=.venv/.installed

die() {
  echo "error: $*" >&2
  exit 1
}

find_python() {
  local python
  for python in python3.13 python3.12 python3.11 python3; do
    if command -v "$python" >/dev/null && "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  die "no Python 3.11 or newer with venv here: install python3 and python3-venv (ci/bootstrap.sh --yes does)"
}

find_uv() {
  if command -v uv >/dev/null; then
    command -v uv
    return
  fi
  if [ ! -x "$state/uv/bin/uv" ]; then
    "$1" -m venv "$state/uv" >&2
    # The lock pins uv with its hashes among the trainer's packages; take exactly that one.
    awk '/^[a-zA-Z0-9]/ { keep = /^uv==/ } keep' lockfiles/trainer-cpu.txt >"$state/uv/uv.txt"
    logged "$state/uv/bin/python" -m pip install --quiet --retries 2 --disable-pip-version-check --require-hashes --no-deps -r "$state/uv/uv.txt"
  fi
  echo "$state/uv/bin/uv"
}

# The program's output goes to a file; a failure is reported in one line.
logged() {
  local log=$state/python-env.log said
  if ! "$@" >"$log" 2>&1; then
    said=$(grep -o 'connection broken by .*' "$log" || grep . "$log") # pip tells the cause among its warnings
    die "the kit's Python environment cannot be installed (${said##*$'\n'}): see that this machine reaches its package index, and $log"
  fi
}

if [ "$environment" -nt lockfiles/kit.txt ] && [ "$environment" -nt ci/python-env.sh ]; then
  exit 0
fi
[ "${CI:-}" != true ] || ci/bootstrap.sh # a machine of CI's may have no Python yet
mkdir -p "$state"
python=$(find_python)
uv=$(find_uv "$python")
if [ ! -x .venv/bin/python ]; then
  "$uv" venv --quiet --python "$python" .venv
fi
logged "$uv" pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes lockfiles/kit.txt
touch "$environment"

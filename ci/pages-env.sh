#!/usr/bin/env bash
# What the tests of pages and of CI files need, and nothing else does: Chromium (Debian's package) and, in .state/pages,
# the Python packages of lockfiles/pages.txt. Prints the path of its Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
state=${KIT_STATE:-.state}
environment=$state/pages

ci/bootstrap.sh "$@" --pages >&2
if [ ! "$environment/.installed" -nt lockfiles/pages.txt ]; then
  uv=$(command -v uv || echo "$state/uv/bin/uv")
  [ -x "$environment/bin/python" ] || "$uv" venv --quiet --python .venv/bin/python "$environment"
  "$uv" pip sync --quiet --python "$environment/bin/python" --require-hashes lockfiles/pages.txt
  touch "$environment/.installed"
fi
echo "$environment/bin/python"

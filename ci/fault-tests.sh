#!/usr/bin/env bash
# Inside the image: whole runs that are hurt on purpose. The working tree's functional/ and tests/ lie in /src.
set -euo pipefail
cd /src
export PYTHONDONTWRITEBYTECODE=1
python -m pytest -q -p no:cacheprovider --durations=0 tests/faults

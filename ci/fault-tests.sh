#!/usr/bin/env bash
# Inside the image: whole runs with faults injected. The working tree's functional/ and tests/ are mounted at /src.
set -euo pipefail
cd /src
export PYTHONDONTWRITEBYTECODE=1
python -m pytest -q -p no:cacheprovider --durations=0 -m "${1:-not full}" tests/faults

#!/usr/bin/env bash
# Inside the image: the tests of what runs there, the suite's with the trainer's Python, the engine's with Dynamo's.
# The working tree's functional/ and tests/ are mounted at /src.
set -euo pipefail
cd /src
export PYTHONDONTWRITEBYTECODE=1
python -m pytest -q -p no:cacheprovider tests --ignore tests/faults

# Dynamo's environment has no pytest; the trainer's is for the same Python.
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir /tmp/pytest
for name in pytest _pytest py.py pluggy iniconfig pygments; do
  ln -s "$packages/$name" /tmp/pytest/
done
PYTHONPATH=/tmp/pytest:/src /opt/dynamo_venv/bin/python -m pytest -q -p no:cacheprovider tests

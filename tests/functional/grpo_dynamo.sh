#!/usr/bin/env bash
# The functional suite: two GRPO steps with real dynamo.vllm.
# In the image it runs here; on a host it runs inside the squashfs of the newest release.
#
# usage: [RECIPE=recipes/grpo_cpu.yaml] bash tests/functional/grpo_dynamo.sh [key=value …]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -e /opt/release/build.json || "${FUNCTIONAL_IN_PLACE:-}" == 1 ]]; then
  exec functional run "${RECIPE:-recipes/grpo_cpu.yaml}" --out "${FUNCTIONAL_OUT:-functional-results}" "$@"
fi
if [[ ! -x .venv/bin/python ]]; then
  echo "error: there is no release with a squashfs in dist: make one: make image sqsh" >&2
  exit 2
fi
exec .venv/bin/python build.py functional ${RECIPE:+"$RECIPE"} "$@"

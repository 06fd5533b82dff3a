#!/usr/bin/env bash
# The functional suite: two GRPO steps with real dynamo.vllm.
# In the image it runs here; on a host it runs inside the squashfs of the newest release.
#
# The recipe is the image's: recipes/grpo_cpu.yaml of a cpu profile, recipes/grpo_gpu.yaml of the others.
#
# usage: [RECIPE=recipes/grpo_cpu.yaml] bash tests/functional/grpo_dynamo.sh [key=value …]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -e /opt/release/build.json || "${FUNCTIONAL_IN_PLACE:-}" == 1 ]]; then
  recipe=recipes/grpo_cpu.yaml
  if grep -Eqs '"profile": "cuda' /opt/release/build.json; then
    recipe=recipes/grpo_gpu.yaml
  fi
  exec functional run "${RECIPE:-$recipe}" --out "${FUNCTIONAL_OUT:-functional-results}" "$@"
fi
if [[ ! -x .venv/bin/python ]]; then
  echo "error: there is no release with a squashfs in dist: make one: make image sqsh" >&2
  exit 2
fi
exec .venv/bin/python build.py functional ${RECIPE:+"$RECIPE"} "$@"

#!/usr/bin/env bash
# Run the suite on a GPU machine from two plain environments, with no container and no network: unpack the parts that
# ci/gpu_pack.sh made over a Python that has torch, run the recipe, report, and end every process that was started.
#
#   CARRY=.carry OUT=/tmp/out RECIPE=functional/recipes/grpo_gpu.yaml bash ci/gpu_run.sh [key=value …]
#
# BASE_PYTHON (python3) has torch for the GPU; WORK (/tmp/dynamo-rl) takes the environments, kept for the next run;
# DEADLINE_S (480) bounds the suite; COMMAND replaces it (say, `python -m pytest tests/engine/test_nccl.py`).
# Exit status: the suite's; 124 past the deadline; 3 when something it started outlived it.
set -euo pipefail
cd "$(dirname "$0")/.."

carry=${CARRY:-.carry}
work=${WORK:-/tmp/dynamo-rl}
out=${OUT:-$PWD/gpu-out}
recipe=${RECIPE:-functional/recipes/grpo_gpu.yaml}
base_python=$(command -v "${BASE_PYTHON:-python3}")
deadline_s=${DEADLINE_S:-480}
run_id="gpu-run-$$-$(date +%s)"

main() {
  mkdir -p "$out"
  step "unpack" unpack
  step "environments" make_environments
  step "versions" versions
  local status=0
  step "suite" run_suite "$@" || status=$?
  step "report" collect_report
  step "processes" end_leftovers || status=3
  echo "gpu_run: exit status $status"
  return "$status"
}

step() {
  local name=$1 started=$SECONDS status=0
  shift
  "$@" || status=$?
  echo "gpu_run: $name: $((SECONDS - started)) s, status $status"
  return "$status"
}

unpack() {
  [ -e "$work/unpacked" ] && return
  mkdir -p "$work"
  [ -e "$carry/part00/zstd" ] || { echo "error: $carry holds no parts: make them with ci/gpu_pack.sh" >&2; return 2; }
  chmod +x "$carry"/part00/zstd
  # `set -e` does not reach into a step, whose status is asked for.
  LD_LIBRARY_PATH="$carry/part00" bash -c 'set -o pipefail
    cat "$0"/part*/carry.* | "$0"/part00/zstd -q -d --long=27' "$carry" | tar x -C "$work" || return
  use_carried_nccl || return
  "$base_python" -m compileall -q -j 0 "$work/site" "$work/nemo" >"$out/compileall.log" 2>&1 || true
  touch "$work/unpacked"
}

# torch finds its NCCL beside itself, whatever the path says: put the carried one in that place.
use_carried_nccl() {
  local theirs
  theirs=$("$base_python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1] / "nvidia/nccl/lib/libnccl.so.2")')
  [ -e "$theirs.orig" ] || mv "$theirs" "$theirs.orig"
  cp "$work/site/nvidia/nccl/lib/libnccl.so.2" "$theirs"
}

make_environments() {
  make_environment "$work/trainer_venv" "$PWD"
  make_environment "$work/dynamo_venv" "$work/engine"
  if [ -e "$work/nemo" ]; then
    make_environment "$work/nemo_rl_venv" "$work/nemo/tree" "$work/nemo/site"
  fi
  cp "$work/bin/etcd" "$work/bin/nats-server" "$work/dynamo_venv/bin/"
  rm -rf "$work/engine"
  "$base_python" -m pip install -q --no-deps --no-index --no-build-isolation --target "$work/engine" functional/engine
}

# make_environment TARGET FIRST…: a virtual environment that sees FIRST, then what was carried, then the base Python's own
# packages.
make_environment() {
  local target=$1 packages own
  "$base_python" -m venv --clear --without-pip "$target"
  packages=$("$base_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  own=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "${@:2}" "$work/site" "import site; site.addsitedir('$packages')" >"$own/carried.pth"
}

versions() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
  "$work/trainer_venv/bin/python" -c 'import torch, transformers, ray, sys
from functional.engine.nccl import Nccl
print("trainer: python", sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__,
      "ray", ray.__version__, "nccl", Nccl().version(), "gpus", torch.cuda.device_count())'
  "$work/dynamo_venv/bin/python" -m functional.engine.plugin 2>/dev/null | tee "$out/engine.json"
}

run_suite() {
  export DYNAMO_VENV="$work/dynamo_venv" PATH="$work/trainer_venv/bin:$PATH" PYTHONUNBUFFERED=1
  local -a command=(python -m functional.suite.cli run "$recipe" "$@" --out "$work/out")
  if [ -n "${COMMAND:-}" ]; then
    command=(bash -c "$COMMAND")
  fi
  rm -rf "$work/out"
  GPU_RUN_ID=$run_id timeout --kill-after=20 "$deadline_s" "${command[@]}" >"$out/suite.log" 2>&1 || {
    local status=$?
    tail -n 60 "$out/suite.log"
    return "$status"
  }
  tail -n 25 "$out/suite.log"
}

# Few and small files, as they may have to travel back.
collect_report() {
  local file
  for file in report.json junit.xml; do
    if [ -e "$work/out/$file" ]; then
      cp "$work/out/$file" "$out/"
    fi
  done
  if [ -d "$work/out" ]; then
    tar cz -C "$work/out" . >"$out/functional.tgz"
  fi
}

# Whatever carries this run's mark in its environment was started by it.
end_leftovers() {
  local -a left=()
  local pid
  while IFS=/ read -r _ _ pid _; do
    [ "$pid" = "$$" ] || left+=("$pid")
  done < <(grep -slzx "GPU_RUN_ID=$run_id" /proc/[0-9]*/environ)
  [ ${#left[@]} -eq 0 ] && return
  echo "left running, ended now:"
  ps -o pid,args -p "${left[@]}" || true
  kill -KILL "${left[@]}" 2>/dev/null || true
  return 1
}

main "$@"

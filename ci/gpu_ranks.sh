#!/usr/bin/env bash
# Engines of several GPUs on a machine with two, one experiment after the other; the trainer shares the first GPU.
#
#   COMMAND='bash ci/gpu_ranks.sh tensor-2 two-engines' DEADLINE_S=560 CARRY=.carry OUT=/tmp/out bash ci/gpu_run.sh
#
# Names: tensor-2, pipeline-2, two-engines, experts-small, experts, rank-faults; all of them without one. Both with experts
# need a pack with EXPERTS=1 (ci/gpu_pack.sh). Each has EACH_S (270) seconds. RESULTS ($OUT/ranks) takes a folder for
# each: report.json, run.log and the logs. Exit status: 1 when one failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

recipe=functional/recipes/grpo_gpu.yaml
results=${RESULTS:-${OUT:-/tmp/out}/ranks}
each_s=${EACH_S:-270}
generation=policy.generation
two_gpus=(cluster.share_gpu=true cluster.gpus_per_node=3 "$generation.colocated.resources.gpus_per_node=2")
tensor=("${two_gpus[@]}" "$generation.vllm_cfg.tensor_parallel_size=2")
experts=("${tensor[@]}" "$generation.vllm_cfg.expert_parallel_size=2")

main() {
  local name failed=0
  mkdir -p "$results"
  [ $# -gt 0 ] || set -- tensor-2 two-engines experts-small experts rank-faults pipeline-2
  for name in "$@"; do
    attempt "$name" || failed=1
  done
  return $failed
}

# attempt NAME
attempt() {
  local started=$SECONDS status=0 out=$results/$1
  rm -rf "$out"
  mkdir -p "$out"
  experiment "$1" "$out" >"$out/run.log" 2>&1 || status=$?
  tail -n 4 "$out/run.log"
  summary "$out/report.json"
  echo "gpu_ranks: $1: $((SECONDS - started)) s, status $status"
  return $status
}

# experiment NAME OUT
experiment() {
  case $1 in
    tensor-2) suite run "$2" "${tensor[@]}" ;;
    pipeline-2) suite run "$2" "${two_gpus[@]}" "$generation.vllm_cfg.pipeline_parallel_size=2" ;;
    two-engines) suite run "$2" "${two_gpus[@]}" ;;
    experts-small) suite run "$2" "${experts[@]}" policy.model_name=builtin:random-qwen3-moe ;;
    experts) suite run "$2" "${experts[@]}" policy.model_name=builtin:random-moe ;;
    rank-faults) suite refit-faults "$2" "${tensor[@]}" --only rank-killed-generating,rank-killed-mid-transfer ;;
    *) echo "error: there is no experiment '$1'" && return 2 ;;
  esac
}

# suite COMMAND OUT [key=value …] [option …]
suite() {
  timeout --kill-after=20 "$each_s" python -m functional.suite.cli "$1" "$recipe" "${@:3}" --out "$2"
}

summary() {
  [ -e "$1" ] || return 0
  python - "$1" <<'END'
import json, sys

report = json.load(open(sys.argv[1]))
print("error:", report["error"])
for check in report["checks"]:
    if not check["passed"]:
        print("FAILED", check["name"], check["detail"][:600])
for refit in report["refits"]:
    phases = {name: round(seconds * 1000) for name, seconds in refit["phases"].items()}
    print(f"version {refit['version']}: {refit['bytes_sent']} bytes sent, proved by rank {refit['proved_bytes']},",
          f"{refit['total_s']:.3f} s, {refit['attempts']} attempt(s), ms: {phases}")
END
}

main "$@"

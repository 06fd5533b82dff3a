#!/usr/bin/env bash
# Engines of several ranks, several engines, and a trainer of two ranks, one experiment after the other. Where there are
# fewer GPUs than an experiment's, trainer and engines take turns on those that there are.
#
#   COMMAND='bash ci/gpu_ranks.sh tensor-2 two-engines' DEADLINE_S=560 CARRY=.carry OUT=/tmp/out bash ci/gpu_run.sh
#
# Names: tensor-2, pipeline-2, two-engines, experts-small, experts, rank-faults, engine-faults (three GPUs); trainer-2 (a
# trainer of two ranks, an engine of tensor parallel 2), trainer-2-one (the same with an engine of one rank),
# three-engines, and the times of updates to one and to three engines, rates-1 and rates-3, and routers-3 (four GPUs);
# probe, the rates of its refit's probe (two GPUs). Fewer GPUs are shared.
# The first six without a name. Both with experts need a pack with EXPERTS=1 (ci/gpu_pack.sh). Each has EACH_S (270)
# seconds. RESULTS ($OUT/ranks) takes a folder for each: report.json, run.log and the logs. Exit status: 1 when one
# failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

recipe=functional/recipes/grpo_gpu.yaml
results=${RESULTS:-${OUT:-/tmp/out}/ranks}
each_s=${EACH_S:-270}
generation=policy.generation
experts="$generation.vllm_cfg.expert_parallel_size=2"

# placed TRAINERS ENGINE_DEVICES RANKS_PER_ENGINE: sets `placed`, on GPUs of their own if there are as many. A shared GPU
# holds several caches, so that their size is given: engines that start at once would measure each other's memory.
placed() {
  local gpus=$(($1 + $2))
  placed=("cluster.gpus_per_node=$gpus" "$generation.colocated.resources.gpus_per_node=$2"
    "$generation.vllm_cfg.tensor_parallel_size=$3")
  if [ "$(nvidia-smi -L | wc -l)" -lt "$gpus" ]; then
    placed+=(cluster.share_gpu=true "$generation.vllm_cfg.gpu_memory_utilization=0.15"
      "$generation.vllm_kwargs.kv_cache_memory_bytes=4000000000" "$generation.max_new_tokens=16")
  fi
}

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
    tensor-2) placed 1 2 2 && suite run "$2" "${placed[@]}" ;;
    pipeline-2) placed 1 2 1 && suite run "$2" "${placed[@]}" "$generation.vllm_cfg.pipeline_parallel_size=2" ;;
    two-engines) placed 1 2 1 && suite run "$2" "${placed[@]}" ;;
    experts-small) placed 1 2 2 && suite run "$2" "${placed[@]}" "$experts" policy.model_name=builtin:random-qwen3-moe ;;
    experts) placed 1 2 2 && suite run "$2" "${placed[@]}" "$experts" policy.model_name=builtin:random-moe ;;
    trainer-2) placed 2 2 2 && suite run "$2" "${placed[@]}" ;;
    trainer-2-one) placed 2 1 1 && suite run "$2" "${placed[@]}" ;;
    three-engines) placed 1 3 1 && suite run "$2" "${placed[@]}" ;;
    rates-1) placed 1 1 1 && suite refit-rates "$2" "${placed[@]}" && rates "$2" ;;
    rates-3) placed 1 3 1 && suite refit-rates "$2" "${placed[@]}" && rates "$2" ;;
    routers-3)
      placed 1 3 1 && suite compare-routers "$2" "${placed[@]}" "$generation.vllm_cfg.max_model_len=1024" \
        --modes kv,round-robin
      ;;
    rank-faults)
      placed 1 2 2 && suite refit-faults "$2" "${placed[@]}" --only rank-killed-generating,rank-killed-mid-transfer
      ;;
    engine-faults)
      placed 1 2 1 && suite refit-faults "$2" "${placed[@]}" \
        --only clear-refused,clear-ignored,worker-stopped-mid-transfer,all-workers-killed,trainer-killed-mid-transfer
      ;;
    probe) placed 1 1 1 && suite probe-rates "$2" "${placed[@]}" ;;
    *) echo "error: there is no experiment '$1'" && return 2 ;;
  esac
}

# suite COMMAND OUT [key=value …] [option …]
suite() {
  timeout --kill-after=20 "$each_s" python -m functional.suite.cli "$1" "$recipe" "${@:3}" --out "$2"
}

# rates OUT: medians in milliseconds, to be held against another number of engines.
rates() {
  python - "$1/refit-rates.json" <<'END'
import json, statistics, sys

rates = json.load(open(sys.argv[1]))
for way, rows in rates["rows"].items():
    medians = {name: round(1000 * statistics.median(row[name] for row in rows), 1) for name in rows[0]}
    print(f"{rates['about']['workers']} engine(s), {way}, ms: {medians}")
END
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

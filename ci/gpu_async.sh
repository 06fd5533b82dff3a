#!/usr/bin/env bash
# The synchronous and the asynchronous loop, one after the other, on whatever GPUs there are: on one, trainer and engine
# share it; on two or more, one trains and one generates. Prints the loops' times, their ratio, ages and idle times.
#
#   COMMAND='bash ci/gpu_async.sh' DEADLINE_S=560 CARRY=.carry OUT=/tmp/out bash ci/gpu_run.sh
#
# Arguments, behind those here: key=value for both. STEPS (8); EACH_S (270) seconds for each run; LOOPS (synchronous
# asynchronous) may name «in-flight» too. RESULTS ($OUT/async) takes a folder for each. MOST (0.75) bounds the ratio where
# there are two GPUs. Exit status: 1 when a run or the bound failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

recipe=functional/recipes/grpo_gpu.yaml
results=${RESULTS:-${OUT:-/tmp/out}/async}
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
overrides=("grpo.max_num_steps=${STEPS:-8}" grpo.num_prompts_per_step=16 policy.generation.max_new_tokens=128
  policy.generation.vllm_kwargs.max_num_seqs=128)
[ "$gpus" -ge 2 ] || overrides+=(cluster.share_gpu=true)

main() {
  local loop failed=0
  mkdir -p "$results"
  for loop in ${LOOPS:-synchronous asynchronous}; do
    attempt "$loop" "$@" || failed=1
  done
  compare || failed=1
  return $failed
}

# attempt LOOP [key=value …]
attempt() {
  local started=$SECONDS status=0 out=$results/$1
  local -a own=()
  case $1 in
    synchronous) ;;
    asynchronous) own=(grpo.async_grpo.enabled=true) ;;
    in-flight) own=(grpo.async_grpo.enabled=true grpo.async_grpo.in_flight_weight_updates=true) ;;
    *) echo "error: there is no loop '$1'" && return 2 ;;
  esac
  rm -rf "$out"
  mkdir -p "$out"
  timeout --kill-after=20 "${EACH_S:-270}" python -m functional.suite.cli run "$recipe" "${overrides[@]}" "${own[@]}" \
    "${@:2}" --out "$out" >"$out/run.log" 2>&1 || status=$?
  tail -n 4 "$out/run.log"
  echo "gpu_async: $1: $((SECONDS - started)) s, status $status"
  return $status
}

compare() {
  python - "$results" "$gpus" "${MOST:-0.75}" <<'END_OF_PYTHON'
import json, pathlib, statistics, sys

results, gpus, most = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
loops = {}
for out in sorted(results.iterdir()):
    if not (out / "report.json").exists():
        continue
    report = json.loads((out / "report.json").read_text())
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    began = next((e["time"] for e in events if e["event"] == "step 1: generating"), None)
    served = [t["time"] for t in report["refit_transitions"] if t["after"] == "serving"]
    if began is None or not served:
        continue
    loops[out.name] = served[-1] - began
    passed = sum(check["passed"] for check in report["checks"])
    print(f"{out.name}: {loops[out.name]:.2f} s for {len(report['steps'])} steps; {passed} of {len(report['checks'])} checks")
    for check in report["checks"]:
        if not check["passed"] or check["name"].startswith("async."):
            print("  ", "passed" if check["passed"] else "FAILED", check["name"], check["detail"][:400])
    print("   updates, s:", " ".join(f"{refit['total_s']:.2f}" for refit in report["refits"]))
    if found := report.get("asynchronous"):
        print("  ", json.dumps(found))
        print("   waited, s:", " ".join(f"{step['waited_s']:.2f}" for step in report["steps"]))
        continue
    answered = {}
    for line in (out / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        first, last = answered.get(row["step"], (row["sent_at"], row["answered_at"]))
        answered[row["step"]] = min(first, row["sent_at"]), max(last, row["answered_at"])
    print("   generation, s:", " ".join(f"{last - first:.2f}" for first, last in answered.values()),
          f"(median {statistics.median(last - first for first, last in answered.values()):.2f})")
if "synchronous" in loops and "asynchronous" in loops:
    ratio = loops["asynchronous"] / loops["synchronous"]
    print(f"asynchronous / synchronous: {ratio:.3f} on {gpus} GPU(s), at most {most} wanted on two")
    sys.exit(gpus >= 2 and ratio > most)
END_OF_PYTHON
}

main "$@"

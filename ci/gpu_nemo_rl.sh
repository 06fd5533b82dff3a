#!/usr/bin/env bash
# NeMo RL's own run_grpo.py with its own dynamo recipe, two steps, trainer and worker on one GPU, from plain environments.
#
#   COMMAND='bash ci/gpu_nemo_rl.sh' DEADLINE_S=500 CARRY=.carry OUT=/tmp/out bash ci/gpu_run.sh
#
# wants parts packed with NEMO_RL=TREE (ci/gpu_pack.sh). The model is a small one that is taught the sums of the data first
# (ci/teach_sums.py); with RANDOM_SHAPE, say Qwen3-0.6B, it is one of that shape with random weights. RUN_S (360) bounds
# the run; further words are overrides of the recipe. What gpu_run.sh collects holds the report, the logs, and nccl.log:
# which settings let two NCCL ranks share the GPU, tried before. Exit status: the run's.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

work=${WORK:-/tmp/dynamo-rl}
shape=${RANDOM_SHAPE:-Qwen3-small}
run_s=${RUN_S:-360}
scratch=$work/nemo-run
out=$work/out
export NEMO_RL_DIR=$work/nemo/tree NEMO_RL_VENV=$work/nemo_rl_venv NEMO_RL_DYNAMO_VENV_DIR=$work/dynamo_venv
export VLLM_USE_FLASHINFER_SAMPLER=0 # the pack leaves FlashInfer out

main() {
  [ -x "$NEMO_RL_VENV/bin/python" ] || { echo "error: the parts hold no NeMo RL: pack them with NEMO_RL=TREE" >&2; return 2; }
  rm -rf "$scratch"
  mkdir -p "$scratch"
  local status=0
  all_steps "$@" || status=$?
  mkdir -p "$out/logs"
  cp "$scratch"/*.log "$out/logs/"
  return "$status"
}

all_steps() {
  step "imports" imports || return 1
  step "inputs" make_inputs || return 1
  [ -n "${RANDOM_SHAPE:-}" ] || step "teaching" teach || return 1
  step "nccl" choose_nccl || return 1
  step "run" run "$@"
}

step() {
  local name=$1 started=$SECONDS status=0
  shift
  "$@" || status=$?
  echo "gpu_nemo_rl: $name: $((SECONDS - started)) s, status $status"
  return "$status"
}

# What the run imports in its processes, so that a package which is missing is named at once.
imports() {
  PYTHONPATH=$NEMO_RL_DIR timeout --kill-after=5 240 "$NEMO_RL_VENV/bin/python" - >"$scratch/imports.log" 2>&1 <<'END' ||
import importlib, traceback

failed = []
for name in (
    "nemo_rl.algorithms.grpo", "nemo_rl.algorithms.async_utils", "nemo_rl.models.policy.workers.dtensor_policy_worker",
    "nemo_rl.models.generation.dynamo.dynamo_worker", "nemo_rl.distributed.stateless_process_group",
    "nemo_rl.environments.math_environment", "nemo_rl.data.utils", "torch.utils.tensorboard", "nccl.core",
):
    try:
        importlib.import_module(name)
    except Exception:
        failed.append(name)
        traceback.print_exc()
import datasets, numpy, pandas, pyarrow, tensorboard, torch, transformers
print({module.__name__: module.__version__ for module in (datasets, numpy, pandas, pyarrow, tensorboard, torch, transformers)})
print("torch's NCCL", torch.cuda.nccl.version())
raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)
END
    { tail -n 30 "$scratch/imports.log"; return 1; }
  tail -n 2 "$scratch/imports.log"
}

make_inputs() {
  timeout --kill-after=5 120 python -m functional.suite.cli make-model "$scratch/model" --shape "$shape" || return
  python - "$scratch/train.jsonl" <<'END'
import json, sys

with open(sys.argv[1], "w", encoding="utf-8") as file:
    for a in range(8):
        for b in range(8):
            file.write(json.dumps({"input": f"What is {a} + {b}?", "output": str(a + b)}) + "\n")
END
}

teach() {
  PYTHONPATH=$PWD timeout --kill-after=5 300 python ci/teach_sums.py "$scratch/model" "$scratch/train.jsonl" \
    "$NEMO_RL_DIR/examples/prompts/cot.txt" >"$scratch/teaching.log" 2>&1 || { tail -n 5 "$scratch/teaching.log"; return 1; }
  tail -n 1 "$scratch/teaching.log"
}

# NeMo RL's trainer sets NCCL_CUMEM_ENABLE=1 itself. Try what may be needed beside it when two ranks share one GPU, the
# least first, with NeMo RL's own process group; what works is exported for the run.
choose_nccl() {
  local settings variable
  for settings in "" "NCCL_P2P_DISABLE=1" "NCCL_P2P_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0"; do
    echo "== NCCL_CUMEM_ENABLE=1 $settings" >>"$scratch/nccl.log"
    # shellcheck disable=SC2086
    if env $settings NCCL_CUMEM_ENABLE=1 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=0 \
      PYTHONPATH="$NEMO_RL_DIR" timeout --kill-after=5 60 "$NEMO_RL_VENV/bin/python" ci/nccl_two_ranks.py \
      >>"$scratch/nccl.log" 2>&1; then
      for variable in $settings; do
        export "${variable?}"
      done
      grep "two ranks" "$scratch/nccl.log" | tail -n 1
      echo "beside NCCL_CUMEM_ENABLE=1: ${settings:-nothing}"
      return
    fi
  done
  tail -n 25 "$scratch/nccl.log"
  return 1
}

run() {
  local model=$scratch/model
  timeout --kill-after=60 $((run_s + 60)) python -m functional.suite.cli run --driver nemo-rl --share-gpu \
    --deadline-s "$run_s" --out "$out" examples/configs/grpo_math_1B_dynamo.yaml \
    "policy.model_name=$model" "policy.tokenizer.name=$model" \
    data.train.dataset_name=ResponseDataset "+data.train.data_path=$scratch/train.jsonl" \
    data.train.split_validation_size=0 env.math.num_workers=2 "$@"
}

main "$@"

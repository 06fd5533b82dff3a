"""Whether the locked Dynamo and vLLM take the arguments that the runtime gives them; needs no GPU.

    ./build.py run --name cuda-trixie --mount "$PWD/ci:/ci:ro" -- /opt/dynamo_venv/bin/python /ci/parse-argv.py

vLLM asks its platform for defaults while it builds the parser, and finds none without a driver: the CPU one stands in.
"""

import json
import tempfile
from pathlib import Path

import vllm.platforms as platforms
from vllm.platforms.cpu import CpuPlatform

ARGUMENTS = """
--served-model-name m --namespace n --discovery-backend etcd --request-plane tcp --event-plane nats --enable-rl
--weight-transfer-config {"backend":"nccl"} --max-model-len 128 --dtype bfloat16 --enforce-eager --max-num-seqs 8
--endpoint-types chat,completions --worker-extension-cls functional.engine.extension.WorkerExtension
--kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557"}
"""
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def main() -> None:
    platforms._current_platform = CpuPlatform()
    from dynamo.vllm.args import parse_args

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = parse_args(["--model", folder, *ARGUMENTS.split()])
    transfer = config.engine_args.weight_transfer_config
    print(f"parsed: enable_rl {config.enable_rl}, endpoints {config.endpoint_types}, {transfer}")


if __name__ == "__main__":
    main()

"""Ranks of a vLLM engine on a CPU, each a process with vLLM's real parallel state over gloo and its real loader.

Small random models of several families are made here too. Their vocabulary is no multiple of 64, and with four tensor
parallel ranks each pair has to share a KV head.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    TORCH_COMPILE_DISABLE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_PLUGINS="dynamo_rl_engine",
    VLLM_LOGGING_LEVEL="ERROR",
)

import torch
import transformers
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.registry import ModelRegistry

VOCAB = 70
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {}),
    "gemma3": ("Gemma3", {"sliding_window": 32, "tie_word_embeddings": True}),
    "granite": ("Granite", {"logits_scaling": 8.0, "attention_multiplier": 0.25}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}
"""Name → transformers' prefix, and what its configuration has beside the common part."""

for _prefix in {prefix for prefix, _ in FAMILIES.values()}:  # vLLM would start a process to look at each class
    _name = f"{_prefix}ForCausalLM"
    ModelRegistry.register_model(_name, ModelRegistry.models[_name].load_model_cls())


def write_family(family: str, folder: Path, **other: Any) -> Path:
    """A random bfloat16 model of the family in `folder`, as transformers saves it."""
    prefix, changes = FAMILIES[family]
    config_class = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    config = config_class(**{"tie_word_embeddings": False, **_COMMON, **changes, **other})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def on_ranks(
    work: Callable[..., Any], folder: Path, *, tensor: int = 1, pipeline: int = 1, expert: bool = False
) -> list[Any]:
    """What `work(model, model_config)` returns on each rank of an engine of this layout; raises what one raises."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as meeting:
        processes = [
            context.Process(
                target=_rank, args=(answers, work, folder, f"file://{meeting}/store", rank, tensor, pipeline, expert)
            )
            for rank in range(tensor * pipeline)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        for _ in processes:
            rank, result, error = answers.get(timeout=180)
            if error is not None:
                for process in processes:
                    process.kill()
                raise AssertionError(f"rank {rank}: {error}")
            results[rank] = result
        for process in processes:
            process.join(30)
    return [results[rank] for rank in sorted(results)]


def _rank(
    answers: Any, work: Callable[..., Any], folder: Path, meeting: str, rank: int, tensor: int, pipeline: int,
    expert: bool,
) -> None:  # fmt: skip
    try:
        torch.set_num_threads(1)
        os.environ["VLLM_DIST_IDENT"] = Path(
            meeting
        ).parent.name  # names the ranks' shared memory, as vLLM's worker does
        config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
            tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, enable_expert_parallel=expert,
            distributed_executor_backend="mp",
        ).create_engine_config()  # fmt: skip
        config.parallel_config.rank = rank
        with set_current_vllm_config(config):
            init_distributed_environment(tensor * pipeline, rank, meeting, rank, "gloo")
            ensure_model_parallel_initialized(tensor, pipeline)
            model = get_model(vllm_config=config)
            result = work(model, config.model_config)
        answers.put((rank, result, None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))

"""A real vLLM CPU engine with the plugin, and two versions of a small random Qwen3 to move between."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    TORCH_COMPILE_DISABLE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_PLUGINS="dynamo_rl_engine",
)


def write_model(path: Path, seed: int, *, tied: bool = True) -> Path:
    """A random bf16 Qwen3: norms and embeddings random too, vocabulary not a multiple of 64."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=tied,
        dtype="bfloat16", eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / f"v{seed}", seed) for seed in range(3)]


@pytest.fixture(scope="session", params=["sha256", "nh"])
def engine(request: pytest.FixtureRequest, versions: list[Path]) -> Iterator[object]:
    """An engine that is asked for each kind of proof."""
    from engines import new_engine

    llm = new_engine(versions[0], request.param)
    yield llm
    del llm

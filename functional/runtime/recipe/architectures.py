"""Which models can be trained here, told from a model's folder before anything starts."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = frozenset(
    {
        "Gemma3ForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Architectures that were trained and proved here, in the engine layouts that `find_layout_problems` lets pass."""
VOCABULARY_MULTIPLE = 64
"""vLLM pads a vocabulary to it, and divides the rows among tensor parallel ranks."""

QUANTIZED = ("quantization_config", "compression_config")
"""Keys of config.json that say how weights are quantized; the second is of older compressed-tensors."""
MODELOPT = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt says so."""


def find_model_problem(config_file: Path) -> str | None:
    """Why a model with this `config.json` cannot be trained here; None when it can."""
    if not config_file.is_file():
        return "its folder holds no config.json"
    try:
        config = _read(config_file)
        generation = _read(beside) if (beside := config_file.with_name("generation_config.json")).is_file() else {}
    except _UnreadableError as error:
        return str(error)
    if not isinstance(generation, dict):  # the IDs that end a completion stand there: lost, completions go on
        return f"its generation_config.json is no JSON object but a {type(generation).__name__}"
    named = config.get("architectures") if isinstance(config, dict) else None
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        return f"architecture {architecture} was never trained and proved here, only {known}"
    quantized = next((key for key in QUANTIZED if config.get(key)), None)
    if quantized is None and config_file.with_name(MODELOPT).exists():
        quantized = MODELOPT
    if problem := _qwen2_head_dim(architecture, config):
        return problem
    if quantized is not None:
        return f"its weights are quantized ({quantized}), and generation runs in bfloat16"
    return None


@dataclass(frozen=True)
class Layout:
    """How the ranks of an engine divide a model. expert: expert parallel size, 1 or `tensor`."""

    tensor: int
    pipeline: int
    expert: int

    def __str__(self) -> str:
        named = {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert}
        return " × ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "one device"

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


def read_config(config_file: Path) -> dict[str, Any]:
    """A model's config.json; empty where it holds no object, which `find_model_problem` says."""
    try:
        config = _read(config_file)
    except _UnreadableError:
        return {}
    return config if isinstance(config, dict) else {}


def find_layout_problems(config: Mapping[str, Any], layout: Layout, device: str) -> Iterator[tuple[str, str]]:
    """Why vLLM cannot divide a model with this `config.json` so: key of `vllm_cfg` and reason. Of what cannot be read,
    nothing."""
    tensor = layout.tensor
    among = f"not divide among {tensor} tensor parallel ranks"
    heads, kv_heads = _number(config, "num_attention_heads"), _number(config, "num_key_value_heads")
    if heads and heads % tensor:
        yield "tensor_parallel_size", f"the model's {heads} attention heads do {among}"
    elif kv_heads and max(kv_heads, tensor) % min(kv_heads, tensor):
        yield "tensor_parallel_size", f"the model's {kv_heads} KV heads do {among}, nor these among them"
    experts = count_experts(config)
    width_key = "moe_intermediate_size" if experts else "intermediate_size"
    width = None if experts and layout.expert > 1 else _number(config, width_key)
    if width and width % tensor:
        yield "tensor_parallel_size", f"the model's {width_key}, {width}, does {among}"
    vocabulary = _number(config, "vocab_size")
    padded = vocabulary and -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded and padded % tensor:
        yield "tensor_parallel_size", f"the model's vocabulary, padded to {padded}, does {among}"
    layers = _number(config, "num_hidden_layers")
    if layers and layout.pipeline > layers:
        yield "pipeline_parallel_size", f"the model has {layers} layers only"
    if layout.expert > 1 and config and not experts:
        yield "expert_parallel_size", "the model has no experts: set it to 1"
    elif layout.expert > 1 and experts and device == "cpu":
        yield "expert_parallel_size", "vLLM's experts on a CPU know no expert parallel ranks: set it to 1"


def count_experts(config: Mapping[str, Any]) -> int | None:
    """Of a layer; None for a model without. A family's own config.json has the first name, and transformers 5 writes
    the second in its place."""
    return _number(config, "num_experts") or _number(config, "num_local_experts")


def _qwen2_head_dim(architecture: str, config: Mapping[str, Any]) -> str | None:
    """vLLM's Qwen2 takes a part of each projection, without a word, where transformers' obeys `head_dim`."""
    hidden, heads, given = (_number(config, key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if architecture != "Qwen2ForCausalLM" or not (hidden and heads and given) or given * heads == hidden:
        return None
    return f"vLLM's Qwen2 ignores its head_dim, {given}, and computes with {hidden // heads}"


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def longest_context(config_file: Path) -> int | None:
    """How many positions a sound model takes, as vLLM reckons; None where that is not plain to see."""
    config = _read(config_file)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = rope.get("rope_type", rope.get("type", "default")) in ("default", "llama3")
    positions = config.get("max_position_embeddings")
    return positions if plain and "model_max_length" not in config and isinstance(positions, int) else None


class _UnreadableError(Exception):
    pass


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _UnreadableError(f"its {file.name} cannot be read: {' '.join(str(error).split())}") from None

"""Which models can be trained here, told from a model's folder before anything starts."""

import json
from pathlib import Path
from typing import Any

FAMILIES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures whose checkpoint names map to vLLM's by fusing alone: those that `proof` can prove."""

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
        return f"no proof of weights for architecture {architecture}, only for {known}"
    quantized = next((key for key in QUANTIZED if config.get(key)), None)
    if quantized is None and config_file.with_name(MODELOPT).exists():
        quantized = MODELOPT
    if quantized is not None:
        return f"its weights are quantized ({quantized}), and generation runs in bfloat16"
    return None


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

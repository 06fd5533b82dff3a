"""Which models can be trained here, told from a model's folder before anything starts."""

import json
from pathlib import Path
from typing import Any

FAMILIES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures whose checkpoint names map to vLLM's by fusing alone: those that `proof` can prove."""


def find_model_problem(config_file: Path) -> str | None:
    """Why a model with this `config.json` cannot be trained here; None when it can."""
    try:
        config: Any = json.loads(config_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "its folder holds no config.json"
    except (OSError, ValueError) as error:
        return f"its config.json cannot be read: {' '.join(str(error).split())}"
    named = config.get("architectures") if isinstance(config, dict) else None
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        return f"no proof of weights for architecture {architecture}, only for {known}"
    if config.get("quantization_config"):
        return "its weights are quantized (quantization_config), and generation runs in bfloat16"
    return None

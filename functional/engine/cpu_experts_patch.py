"""Patch of vLLM 0.23.0: experts on a CPU without a kernel for them (x86 without AVX-512).

There vLLM computes them by torch, and makes the activation's layer anew in every forward pass, where no layer can be
made: there is no configuration. The layer's function needs none.
"""

import importlib
from typing import Any

PATCHED_VERSION = "0.23.0"


def is_wanted() -> bool:
    """Whether this vLLM computes on a CPU."""
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    on_cpu: bool = platform.is_cpu()
    return on_cpu


def apply() -> None:
    """Patch the table of activations in this process. Does nothing the second time."""
    experts, activation = _patched_module(), _silu()
    experts._CPU_MOE_ACT_FN[experts.MoEActivation.SILU] = activation


def is_applied() -> bool:
    experts = _patched_module()
    return experts._CPU_MOE_ACT_FN[experts.MoEActivation.SILU] is _silu()


def _patched_module() -> Any:
    return importlib.import_module("vllm.model_executor.layers.fused_moe.cpu_fused_moe")


def _silu() -> Any:
    return importlib.import_module("vllm.model_executor.layers.activation").SiluAndMul.forward_native

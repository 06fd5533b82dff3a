"""Patch of vLLM 0.23.0: its layerwise reload counts a composed weight loader's elements twice.

A layer is finalised once as many elements were copied as it has. A composed loader copies the weight and then its
transform over it, so it counts double, and the layer can be finalised before its last parameter came; what comes after
is dropped without an error. Upstream repaired this in vLLM pull request 44814. Here, too, one loader call counts for at
most its parameter's size.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

PATCHED_VERSION = "0.23.0"


def apply() -> None:
    """Patch the reload module in this process. Does nothing the second time."""
    layerwise = _patched_module()
    original = layerwise.get_numel_loaded
    if getattr(original, "counts_at_most_the_parameter", False):
        return

    def get_numel_loaded(weight_loader: Callable[..., object], args: inspect.BoundArguments) -> tuple[int, object]:
        loaded, answer = original(weight_loader, args)
        return min(loaded, args.arguments["param"].numel()), answer

    setattr(get_numel_loaded, "counts_at_most_the_parameter", True)  # noqa: B010 (a function has no such field to mypy)
    layerwise.get_numel_loaded = get_numel_loaded


def is_applied() -> bool:
    return getattr(_patched_module().get_numel_loaded, "counts_at_most_the_parameter", False)


def _patched_module() -> Any:
    return importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")

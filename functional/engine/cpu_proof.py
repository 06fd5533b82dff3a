"""Proof for vLLM's CPU layers, which pack their weight into a oneDNN handle and then drop it.

The hash is taken in vLLM's own packing function, of the very tensor that is packed, just before. It covers every
layer's first load from disk and every reload.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from functional.engine.proof import TensorProof, prove_tensor

_packed: "WeakKeyDictionary[torch.nn.Module, TensorProof]" = WeakKeyDictionary()


def install() -> None:
    """Wrap the function through which vLLM's CPU layers pack. Does nothing the second time."""
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if getattr(original, "hashes_before_packing", False):
        return

    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        _packed.pop(layer, None)
        weight = layer.weight
        if isinstance(weight, Tensor) and not weight.is_meta:
            _packed[layer] = prove_tensor(logical_rows(layer, weight))
        original(layer, *args, **kwargs)

    setattr(dispatch_cpu_unquantized_gemm, "hashes_before_packing", True)  # noqa: B010 (a function has no such field to mypy)
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def is_installed() -> bool:
    from vllm.model_executor.layers import utils

    return getattr(utils.dispatch_cpu_unquantized_gemm, "hashes_before_packing", False)


def packed_proof(layer: torch.nn.Module) -> TensorProof | None:
    """Proof of the weight that this layer packed last; None for a layer that packs nothing."""
    return _packed.get(layer)


def logical_rows(layer: torch.nn.Module, weight: Tensor) -> Tensor:
    """The weight without the rows that vLLM pads a vocabulary with."""
    rows = getattr(layer, "org_vocab_size", None)
    return weight if rows is None else weight[:rows]

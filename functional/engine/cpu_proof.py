"""Proof for vLLM's CPU layers, which pack their weight into a oneDNN handle and then drop it.

What the proof needs is taken in vLLM's own packing function, of the very tensor that is packed, just before; at every
layer's first load from disk and at every reload. For SHA-256 that is the hash. The keyed hash has no key yet, so there
the bytes themselves are kept, for as long as the layer is packed with them: packed weights are then held twice.
"""

import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from functional.engine import nh
from functional.engine.proof import TensorProof, prove_all, prove_tensor
from functional.engine.transports import PROOF_VARIABLE

_packed: "WeakKeyDictionary[torch.nn.Module, TensorProof | Tensor]" = WeakKeyDictionary()


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
            _packed[layer] = _taken(logical_rows(layer, weight))
        original(layer, *args, **kwargs)

    setattr(dispatch_cpu_unquantized_gemm, "hashes_before_packing", True)  # noqa: B010 (a function has no such field to mypy)
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def is_installed() -> bool:
    from vllm.model_executor.layers import utils

    return getattr(utils.dispatch_cpu_unquantized_gemm, "hashes_before_packing", False)


def packed_proofs(layers: Mapping[str, torch.nn.Module], key: nh.Key | None) -> dict[str, TensorProof]:
    """By name, proofs of the weights that these layers packed last; layers that pack nothing are left out.

    Raises RuntimeError where this engine kept what the other kind of proof needs.
    """
    taken = {name: _packed[layer] for name, layer in layers.items() if layer in _packed}
    proofs = {name: one for name, one in taken.items() if isinstance(one, TensorProof)}
    kept = {name: one for name, one in taken.items() if isinstance(one, Tensor)}
    if proofs if key else kept:
        kept_for, asked = ("sha256", "nh") if key else ("nh", "sha256")
        raise RuntimeError(f"packed weights were kept for {kept_for}: start the engine with {PROOF_VARIABLE}={asked}")
    return proofs | prove_all(((name, [weight]) for name, weight in kept.items()), key)


def logical_rows(layer: torch.nn.Module, weight: Tensor) -> Tensor:
    """The weight without the rows that vLLM pads a vocabulary with."""
    rows = getattr(layer, "org_vocab_size", None)
    return weight if rows is None else weight[:rows]


def _taken(weight: Tensor) -> TensorProof | Tensor:
    if os.environ.get(PROOF_VARIABLE) == "nh":
        return weight.detach().clone()
    return prove_tensor(weight)

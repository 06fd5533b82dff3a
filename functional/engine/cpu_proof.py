"""Proof for vLLM's CPU layers, which pack their weight into a oneDNN handle and then drop it, or pack experts in place.

What the proof needs is taken where vLLM packs, of the very tensor that is packed, just before; at every layer's first
load from disk and at every reload. For SHA-256 that is the hash. The keyed hash has no key yet, so there
the bytes themselves are kept, for as long as the layer is packed with them: packed weights are then held twice.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from functional.engine import cpu_resident, nh
from functional.engine.proof import TensorProof, prove_all, prove_tensor
from functional.engine.transports import PROOF_VARIABLE

_packed: "WeakKeyDictionary[nn.Module, dict[str, TensorProof | Tensor]]" = WeakKeyDictionary()
"""Layer → parameter's attribute → what was taken of it last."""
_loaded_first: "WeakKeyDictionary[nn.Module, ref[Tensor]]" = WeakKeyDictionary()
"""Layer → the parameter that it packed when it was first loaded, while there is one: layers that share it are tied."""
_EXPERTS = ("w13_weight", "w2_weight")
_MARK = "hashes_before_packing"


def install() -> None:
    """Wrap the functions through which vLLM's CPU layers pack. Does nothing the second time."""
    if is_installed():
        return
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    experts = _experts_method()
    process = experts.process_weights_after_loading

    def dispatch_cpu_unquantized_gemm(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        if cpu_resident.is_wanted():
            dispatch(layer, *args, **kwargs)
            return
        _take(layer, ("weight",))
        first = _loaded_first.setdefault(layer, ref(layer.weight))
        dispatch(layer, *args, **kwargs)
        _hand_on(layer, first)

    def process_weights_after_loading(self: Any, layer: nn.Module) -> None:
        _take(layer, _EXPERTS)
        process(self, layer)

    setattr(dispatch_cpu_unquantized_gemm, _MARK, True)
    setattr(process_weights_after_loading, _MARK, True)
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
    experts.process_weights_after_loading = process_weights_after_loading


def is_installed() -> bool:
    from vllm.model_executor.layers import utils

    wrapped = (utils.dispatch_cpu_unquantized_gemm, _experts_method().process_weights_after_loading)
    return all(getattr(function, _MARK, False) for function in wrapped)


def is_packed_over(layer: nn.Module, attribute: str) -> bool:
    """Whether what the layer holds under this name is its packed form."""
    return attribute in _EXPERTS and layer in _packed


def packed_proofs(places: Mapping[str, tuple[nn.Module, str]], key: nh.Key | None) -> dict[str, TensorProof]:
    """By name, proofs of the weights that these layers packed last; those that were not packed are left out.

    Raises RuntimeError where this engine kept what the other kind of proof needs.
    """
    found = {name: _packed.get(layer, {}).get(attribute) for name, (layer, attribute) in places.items()}
    proofs = {name: one for name, one in found.items() if isinstance(one, TensorProof)}
    kept = {name: one for name, one in found.items() if isinstance(one, Tensor)}
    if proofs if key else kept:
        kept_for, asked = ("sha256", "nh") if key else ("nh", "sha256")
        raise RuntimeError(f"packed weights were kept for {kept_for}: start the engine with {PROOF_VARIABLE}={asked}")
    return proofs | prove_all(((name, [weight]) for name, weight in kept.items()), key)


def _take(layer: nn.Module, attributes: Iterable[str]) -> None:
    _packed.pop(layer, None)
    weights = {attribute: getattr(layer, attribute) for attribute in attributes}
    if all(isinstance(weight, Tensor) and weight.device.type == "cpu" for weight in weights.values()):
        _packed[layer] = {attribute: _taken(weight) for attribute, weight in weights.items()}


def _hand_on(layer: nn.Module, first: "ref[Tensor]") -> None:
    """Layers that are tied to this one compute with what it has packed. vLLM 0.23.0 loads, and packs, one of them in a
    reload (the embedding of Llama and Gemma 3), and leaves the other, the head, with what it packed before."""
    parameter = first()
    if parameter is None or parameter is layer.weight:  # dropped, or the first load, in which each packs
        return
    for other, of_other in list(_loaded_first.items()):
        if other is not layer and of_other() is parameter:
            other.cpu_linear = layer.cpu_linear
            _packed[other] = _packed[layer]


def _experts_method() -> Any:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    return UnquantizedFusedMoEMethod


def _taken(weight: Tensor) -> TensorProof | Tensor:
    if os.environ.get(PROOF_VARIABLE) == "nh":
        return weight.detach().clone()
    return prove_tensor(weight)

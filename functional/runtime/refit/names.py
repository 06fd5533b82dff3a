"""The trainer's side of the proof of weights: what the engine must hold, under the engine's names."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from functional.engine.proof import prove_all
from functional.runtime.recipe.architectures import FAMILIES

_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}


def expected_proof(named_tensors: Iterable[tuple[str, Tensor]], config: Any) -> dict[str, dict[str, Any]]:
    """What `prove_weights` must find after these tensors (checkpoint names, as sent) were loaded.

    `config` is the model's Hugging Face configuration: its architecture decides the names, tied embeddings drop
    `lm_head`. Every byte is hashed. Raises ValueError for an unknown architecture, a name given twice, or a fused
    parameter of which a part is missing.
    """
    architecture = next(iter(getattr(config, "architectures", None) or ["none"]))
    if architecture not in FAMILIES:
        raise ValueError(f"no proof for architecture {architecture}, only for {', '.join(sorted(FAMILIES))}")
    tied = bool(getattr(config, "tie_word_embeddings", False))
    proofs = prove_all(
        _fuse((name, tensor) for name, tensor in named_tensors if not (tied and name == "lm_head.weight"))
    )
    return {name: proof.as_dict() for name, proof in proofs.items()}


def engine_name(name: str) -> tuple[str, int, int]:
    """Engine's parameter for a checkpoint name, which part of it this is, and of how many."""
    path, _, kind = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    fused, part = _FUSED.get(module, (module, 0))
    return f"{parent}.{fused}.{kind}" if parent else f"{fused}.{kind}", part, _PARTS.get(fused, 1)


def _fuse(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, list[Tensor]]]:
    waiting: dict[str, dict[int, Tensor]] = {}
    finished = set()
    for name, tensor in named:
        target, part, count = engine_name(name)
        parts = waiting.setdefault(target, {})
        if target in finished or part in parts:
            raise ValueError(f"{name} was given twice")
        parts[part] = tensor
        if len(parts) == count:
            finished.add(target)
            yield target, [parts[index] for index in range(count)]
            del waiting[target]
    if waiting:
        raise ValueError(f"parts of {next(iter(waiting))} are missing")

"""The engine's names for a checkpoint's tensors, and under them what a proof of weights must find in each engine."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from functional.engine.nh import Key
from functional.engine.proof import Proof, TensorProof, prove_all, prove_tensor
from functional.engine.transports import ProofKind
from functional.runtime.recipe.architectures import FAMILIES

NamedTensors = Iterable[tuple[str, Tensor]]
"""Checkpoint name and tensor of each weight."""

_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_POLL_S = 0.05


def expected_proof(named: NamedTensors, config: Any, kind: ProofKind = "sha256") -> Proof:
    """What `prove_weights` must find after these tensors were loaded. Raises as `ExpectedProof` does."""
    with ExpectedProof(config, kind) as expected:
        for name, tensor in named:
            expected.add(name, tensor)
        return expected.result()


class ExpectedProof:
    """Takes in tensors as they are sent, and answers the proof. Every byte is hashed.

    SHA-256 begins at once, in threads of its own, so that whoever sends does not wait for it; a tensor is kept until it
    is hashed. The keyed hash begins with `result`, which draws the key, and all tensors are kept until then. A tensor
    must not change while it is kept.
    """

    def __init__(self, config: Any, kind: ProofKind, device: torch.device | None = None) -> None:
        """`config` is the model's Hugging Face configuration: its architecture decides the names, tied embeddings drop
        `lm_head`. device: where tensors of the host are hashed with a key. Raises ValueError for an unknown
        architecture."""
        architecture = next(iter(getattr(config, "architectures", None) or ["none"]))
        if architecture not in FAMILIES:
            raise ValueError(f"no proof for architecture {architecture}, only for {', '.join(sorted(FAMILIES))}")
        self._is_tied = bool(getattr(config, "tie_word_embeddings", False))
        self._kind = kind
        self._device = device
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._whole: dict[str, list[Tensor]] = {}
        self._proofs: dict[str, Future[TensorProof]] = {}
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="proof")

    def watch(self, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, each added as it is taken."""
        for name, tensor in named:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in a tensor under its checkpoint name. Raises ValueError for a name given twice."""
        if self._is_tied and name == "lm_head.weight":
            return
        target, part, count = engine_name(name)
        parts = self._parts.setdefault(target, {})
        if target in self._whole or target in self._proofs or part in parts:
            raise ValueError(f"{name} was given twice")
        parts[part] = tensor
        if len(parts) < count:
            return
        del self._parts[target]
        whole = [parts[index] for index in range(count)]
        if self._kind == "sha256":
            self._proofs[target] = _submit(self._pool, whole)
        else:
            self._whole[target] = whole

    def result(self, timeout_s: float | None = None, check: Callable[[], None] = lambda: None) -> Proof:
        """The proof, once all is hashed; `check` is called meanwhile, and may raise.

        Raises ValueError for a fused parameter of which a part is missing, TimeoutError after `timeout_s`.
        """
        if self._parts:
            raise ValueError(f"parts of {next(iter(self._parts))} are missing")
        if self._kind == "nh":
            key = Key.draw()
            return Proof(key, prove_all(self._whole.items(), key, self._device))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while left := wait(self._proofs.values(), _POLL_S).not_done:
            check()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{len(left)} of {len(self._proofs)} parameters not hashed within {timeout_s:g} s")
        return Proof(None, {name: proof.result() for name, proof in self._proofs.items()})

    def close(self) -> None:
        """Let go of what is kept. Harmless when repeated."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._whole.clear()

    def __enter__(self) -> "ExpectedProof":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def engine_name(name: str) -> tuple[str, int, int]:
    """Engine's parameter for a checkpoint name, which part of it this is, and of how many."""
    path, _, kind = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    fused, part = _FUSED.get(module, (module, 0))
    return f"{parent}.{fused}.{kind}" if parent else f"{fused}.{kind}", part, _PARTS.get(fused, 1)


def _submit(pool: ThreadPoolExecutor, parts: list[Tensor]) -> "Future[TensorProof]":
    """Hash in the pool, once what makes the tensors has run."""
    device = parts[0].device
    if device.type != "cuda":
        return pool.submit(prove_tensor, *parts)
    made = torch.cuda.Event()
    made.record(torch.cuda.current_stream(device))
    return pool.submit(_prove_once_made, made, parts)


def _prove_once_made(made: Any, parts: list[Tensor]) -> TensorProof:
    torch.cuda.current_stream(parts[0].device).wait_event(made)
    return prove_tensor(*parts)

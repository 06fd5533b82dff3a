"""What a proof of weights must find on each rank of an engine, made of the checkpoint's tensors by the ranks' plans."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functional.engine.nh import Key
from functional.engine.plan import Copy, Plan, PlanRefused, Target, covered
from functional.engine.proof import EngineProof, TensorProof, prove_all, prove_tensor
from functional.engine.transports import ProofKind
from functional.engine.wire import Slot

NamedTensors = Iterable[tuple[str, Tensor]]
"""Checkpoint name and tensor of each weight."""

_POLL_S = 0.05


def check_coverage(plans: Sequence[Plan], slots: Iterable[Slot], may_be_left: frozenset[str] = frozenset()) -> None:
    """Every element of every tensor must be taken by a rank. Raises PlanRefused, by tensor.

    may_be_left: tensors that no rank may take at all (a tied head).
    """
    takes = defaultdict(list)
    for plan in plans:
        for copy in plan.copies:
            takes[copy.source].append(copy.take)
    problems = {}
    for slot in slots:
        numel = slot.nbytes // slot.dtype.itemsize
        taken = covered(numel, set(takes[slot.name]))
        if taken < numel and not (taken == 0 and slot.name in may_be_left):
            problems[slot.name] = f"no rank of the engine takes {numel - taken} of its {numel} elements"
    if problems:
        raise PlanRefused(problems)


class ExpectedProof:
    """Takes in tensors as they are sent, and answers the proof. Every byte that a rank holds is hashed, padding too.

    What several ranks hold alike is hashed once. SHA-256 begins as soon as a parameter's tensors are there, in threads
    of its own, so that whoever sends does not wait for it; a tensor is kept until it is hashed. The keyed hash begins
    with `result`, which draws the key, and all tensors are kept until then. A tensor must not change while it is kept.
    """

    def __init__(self, plans: Sequence[Plan], kind: ProofKind, device: torch.device | None = None) -> None:
        """plans: of the engine's ranks, in order. device: where tensors of the host are hashed with a key."""
        self._kind = kind
        self._device = device
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="proof")
        self._given: set[str] = set()
        self._waiting: dict[str, list[_Parameter]] = defaultdict(list)
        self._proofs: dict[_Parameter, Future[TensorProof]] = {}
        self._whole: list[_Parameter] = []
        alike: dict[Any, _Parameter] = {}
        self._ranks = [_parameters(plan, alike) for plan in plans]
        for parameter in alike.values():
            for source in parameter.sources:
                self._waiting[source].append(parameter)
            if not parameter.sources:
                self._complete(parameter)

    def watch(self, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, each added as it is taken."""
        for name, tensor in named:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in a tensor under its checkpoint name. Raises ValueError for a name given twice."""
        if name in self._given:
            raise ValueError(f"{name} was given twice")
        self._given.add(name)
        for parameter in self._waiting.pop(name, []):
            parameter.held[name] = tensor
            if len(parameter.held) == len(parameter.sources):
                self._complete(parameter)

    def result(self, timeout_s: float | None = None, check: Callable[[], None] = lambda: None) -> EngineProof:
        """The proof, once all is hashed; `check` is called meanwhile, and may raise.

        Raises ValueError where a tensor that a rank takes was not given, TimeoutError after `timeout_s`.
        """
        if self._waiting:
            raise ValueError(f"{min(self._waiting)} was not given, of {len(self._waiting)} tensor(s) that ranks take")
        if self._kind == "nh":
            key = Key.draw()
            parts = ((str(index), one.parts(self._device)) for index, one in enumerate(self._whole))
            found = prove_all(parts, key, self._device)
            proofs = {one: one.named(found[str(index)]) for index, one in enumerate(self._whole)}
            return self._of_ranks(key, proofs)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while left := wait(self._proofs.values(), _POLL_S).not_done:
            check()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{len(left)} of {len(self._proofs)} parameters not hashed within {timeout_s:g} s")
        return self._of_ranks(None, {one: proof.result() for one, proof in self._proofs.items()})

    def close(self) -> None:
        """Let go of what is kept. Harmless when repeated."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._whole.clear()
        self._waiting.clear()

    def __enter__(self) -> "ExpectedProof":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _complete(self, parameter: "_Parameter") -> None:
        if self._kind == "sha256":
            self._proofs[parameter] = _submit(self._pool, parameter)
        else:
            self._whole.append(parameter)

    def _of_ranks(self, key: Key | None, proofs: "dict[_Parameter, TensorProof]") -> EngineProof:
        ranks = [{name: proofs[parameter] for name, parameter in own.items()} for own in self._ranks]
        return EngineProof(key, tuple(ranks))


@dataclass(eq=False)
class _Parameter:
    """What one rank, or several, hold: its form, and the copies that make it, in the order of its memory; of the
    tensors that they take, those that are there."""

    target: Target
    copies: list[Copy]
    sources: set[str]
    held: dict[str, Tensor] = field(default_factory=dict)

    def parts(self, device: torch.device | None) -> list[Tensor]:
        """One-dimensional tensors that make its bytes when joined: views of the sources, where they lie as it does.

        device: of the zeros of a parameter that no tensor has a part of (padding).
        """
        target, numel = self.target, self.target.numel
        if not self._is_joined():
            device = next(iter(self.held.values())).device if self.held else device
            whole = torch.zeros(numel, dtype=target.dtype, device=device).as_strided(target.shape, target.strides)
            for copy in self.copies:
                copy.put.on(whole).copy_(copy.take.on(self.held[copy.source]))
            return [whole.reshape(-1)]
        found: list[Tensor] = []
        end = 0
        for copy in self.copies:
            taken = copy.take.on(self.held[copy.source])
            if copy.put.offset > end:
                found.append(taken.new_zeros(copy.put.offset - end))
            found.append(taken.reshape(-1))
            end = copy.put.offset + copy.numel
        if end < numel:
            found.append(found[-1].new_zeros(numel - end))
        return found

    def named(self, proof: TensorProof) -> TensorProof:
        """A proof of `parts` as one of the parameter."""
        return TensorProof(proof.dtype, self.target.shape, proof.nbytes, proof.digest)

    def _is_joined(self) -> bool:
        target = self.target
        plain = torch.empty(target.shape, device="meta").stride() == target.strides
        same = all(tensor.dtype == target.dtype for tensor in self.held.values())
        return bool(self.held) and plain and same and all(copy.put.is_contiguous for copy in self.copies)


def _parameters(plan: Plan, alike: dict[Any, _Parameter]) -> dict[str, _Parameter]:
    """By the engine's name. alike: by what makes them, those of all ranks; each is there once."""
    copies: dict[str, list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        copies[copy.target].append(copy)
    found = {}
    for target in plan.targets:
        own = sorted(copies[target.name], key=lambda copy: copy.put.offset)
        made = tuple((copy.source, copy.take, copy.put) for copy in own)
        parameter = _Parameter(target, own, {copy.source for copy in own})
        found[target.name] = alike.setdefault((target.dtype, target.shape, target.strides, made), parameter)
    return found


def _submit(pool: ThreadPoolExecutor, parameter: _Parameter) -> "Future[TensorProof]":
    """Hash in the pool, once what makes the tensors has run."""
    device = next((tensor.device for tensor in parameter.held.values()), torch.device("cpu"))
    made: Any = None
    if device.type == "cuda":
        made = torch.cuda.Event()
        made.record(torch.cuda.current_stream(device))
    return pool.submit(_prove_once_made, parameter, device, made)


def _prove_once_made(parameter: _Parameter, device: torch.device, made: Any) -> TensorProof:
    if made is not None:
        torch.cuda.current_stream(device).wait_event(made)
    proof = parameter.named(prove_tensor(*parameter.parts(device)))
    parameter.held.clear()
    return proof

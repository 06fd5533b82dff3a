"""What can go wrong in a send, on purpose: a weight source that pauses, fails, or sends other bytes than it should."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from functional.engine.plan_wire import Verdict
from functional.engine.wire import Manifest
from functional.runtime.refit.expected import NamedTensors
from functional.runtime.refit.source import LocalWeights

T = TypeVar("T")
Kind = Literal["pause", "fail", "swap", "flip", "skip", "twice", "old"]


@dataclass(frozen=True)
class SendFault:
    """pause and fail: after `after` tensors. flip, skip and twice: at that tensor. swap: the first two of equal shape.
    old: the version before the one asked for is sent, and proved.

    version: the one update it is for (None: any); times: how often it happens; pause_s: longest pause.
    """

    kind: Kind
    after: int = 0
    version: int | None = None
    pause_s: float = 20.0
    times: int = 1


class FaultyWeights(LocalWeights):
    """`fault` is what goes wrong next; it counts itself down with every send it struck.

    Tensors then travel one by one, so that those before the fault have been loaded when it happens. The proof is of
    the true weights.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fault: SendFault | None = None
        self._aborted = threading.Event()

    def metadata(self, version: int) -> Manifest:
        fault = self._present(version)
        if fault is None:
            return super().metadata(version)
        slots = super().metadata(given(version, fault)).slots
        return Manifest(tuple(left_out_or_doubled(slots, fault)), packed=False)

    def send(self, version: int) -> None:
        self._aborted.clear()
        fault = self._present(version)
        if fault is None:
            super().send(version)
            return
        try:
            named, manifest = self._weights(given(version, fault)), self.metadata(version)
            self._send(version, manifest, named, lambda true: self._sending(tampered(true, fault), fault))
        finally:
            self.fault = replace(fault, times=fault.times - 1)

    def send_by_plan(self, version: int) -> Verdict:
        self._aborted.clear()
        fault = self._present(version)
        if fault is None:
            return super().send_by_plan(version)
        try:
            return self._send_by_plan(
                given(version, fault), lambda true: self._sending(self._in_place(true, version, fault), fault)
            )
        finally:
            self.fault = replace(fault, times=fault.times - 1)

    def _in_place(self, true: NamedTensors, version: int, fault: SendFault) -> NamedTensors:
        """As `tampered`. Each tensor has its place in an update by plan: one that is skipped stays as it was."""
        if fault.kind != "skip":
            return tampered(true, fault)
        before = dict(self._weights(version - 1))
        return ((name, before[name] if index == fault.after else tensor) for index, (name, tensor) in enumerate(true))

    def abort(self, reason: str) -> None:
        self._aborted.set()
        super().abort(reason)

    def _present(self, version: int) -> SendFault | None:
        fault = self.fault
        if fault is None or fault.times < 1 or fault.version not in (None, version):
            return None
        return fault

    def _sending(self, named: NamedTensors, fault: SendFault) -> NamedTensors:
        for index, item in enumerate(named):
            if index == fault.after:
                if fault.kind == "pause":
                    self._aborted.wait(fault.pause_s)
                elif fault.kind == "fail":
                    raise RuntimeError(f"injected: the send fails after {index} tensors")
            yield item


def given(version: int, fault: SendFault) -> int:
    """The version whose weights are sent, and proved."""
    return version - 1 if fault.kind == "old" else version


def tampered(named: NamedTensors, fault: SendFault) -> NamedTensors:
    """The tensors with one fault among them; pause, fail and old leave them as they are."""
    if fault.kind == "swap":
        return swapped(named)
    if fault.kind == "flip":
        return (
            (name, flipped(tensor) if index == fault.after else tensor) for index, (name, tensor) in enumerate(named)
        )
    return left_out_or_doubled(named, fault)


def left_out_or_doubled(items: Iterable[T], fault: SendFault) -> Iterator[T]:
    """Without the item that a skip leaves out, or with the one twice that is sent twice."""
    for index, item in enumerate(items):
        here = index == fault.after
        if here and fault.kind == "skip":
            continue
        yield item
        if here and fault.kind == "twice":
            yield item


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the lowest bit of its last element flipped."""
    copy = tensor.clone()
    copy.view(-1).view(torch.int16)[-1] ^= 1
    return copy


def swapped(named: NamedTensors) -> NamedTensors:
    """The first two neighbouring tensors of equal shape under each other's names."""
    items = list(named)
    for index, ((_, first), (_, second)) in enumerate(itertools.pairwise(items)):
        if first.shape == second.shape and not torch.equal(first, second):
            items[index], items[index + 1] = (items[index][0], second), (items[index + 1][0], first)
            yield from items
            return
    raise ValueError("no two neighbouring tensors have the same shape")

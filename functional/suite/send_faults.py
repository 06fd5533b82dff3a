"""What can go wrong in a send, on purpose: a weight source that pauses, fails, or sends other bytes than it should."""

import itertools
import threading
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from functional.runtime.refit.names import expected_proof
from functional.runtime.refit.source import LocalWeights, NamedTensors

Kind = Literal["pause", "fail", "swap", "flip", "skip", "twice", "old"]


@dataclass(frozen=True)
class SendFault:
    """pause and fail: after `after` tensors. flip, skip and twice: at that tensor. swap: the first two of equal shape.
    old: the version before the one selected is sent, and proved.

    version: the one update it is for (None: any); times: how often it strikes; pause_s: longest pause.
    """

    kind: Kind
    after: int = 0
    version: int | None = None
    pause_s: float = 20.0
    times: int = 1


class FaultyWeights(LocalWeights):
    """`fault` is what goes wrong next; it counts itself down with every send it struck.

    Tensors then travel one by one, so that those before the fault have been loaded when it strikes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fault: SendFault | None = None
        self._given = 0
        self._aborted = threading.Event()

    @property
    def packed(self) -> bool:  # type: ignore[override]
        return self._present() is None

    def send(self) -> None:
        self._aborted.clear()
        fault = self._present()
        try:
            super().send()
        finally:
            if fault is not None:
                self.fault = replace(fault, times=fault.times - 1)

    def abort(self, reason: str) -> None:
        self._aborted.set()
        super().abort(reason)

    def _present(self) -> SendFault | None:
        fault = self.fault
        if fault is None or fault.times < 1 or fault.version not in (None, self._version):
            return None
        return fault

    def select(self, version: int) -> None:
        super().select(version)
        fault = self._present()
        self._given = version - 1 if fault is not None and fault.kind == "old" else version

    def expected_proof(self) -> dict[str, Any]:
        return expected_proof(self._weights(self._given), self._config)

    def _on_wire(self) -> NamedTensors:
        fault, named = self._present(), self._weights(self._given)
        return named if fault is None else tampered(named, fault)

    def _sending(self, named: NamedTensors) -> NamedTensors:
        fault = self._present()
        for index, item in enumerate(named):
            if fault is not None and index == fault.after:
                if fault.kind == "pause":
                    self._aborted.wait(fault.pause_s)
                elif fault.kind == "fail":
                    raise RuntimeError(f"injected: the send fails after {index} tensors")
            yield item


def tampered(named: NamedTensors, fault: SendFault) -> NamedTensors:
    """The tensors with one fault among them; pause and fail leave them as they are."""
    if fault.kind == "swap":
        yield from swapped(named)
        return
    for index, (name, tensor) in enumerate(named):
        here = index == fault.after
        if here and fault.kind == "skip":
            continue
        yield name, flipped(tensor) if here and fault.kind == "flip" else tensor
        if here and fault.kind == "twice":
            yield name, tensor


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
            return iter(items)
    raise ValueError("no two neighbouring tensors have the same shape")

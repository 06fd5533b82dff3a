"""A plan: which bytes of a checkpoint's tensors make up each parameter of one engine rank, as strided copies.

With it a refit copies straight into the parameters and needs the engine's loader no more. `plan_trace` learns it from
that loader, `plan_check` holds it against the loader on random bits, `plan_schedule` makes of all ranks' plans what
the sender sends, `plan_copy` carries it out.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from functional.engine.wire import Slot

_NAMED_AT_MOST = 3


class PlanRefused(Exception):  # noqa: N818 (a finding, not a failure: the checkpoint protocol is used then)
    """No plan covers this model. `problems`: tensor's name → why, the first being the first that was met."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        self.problems = dict(problems)
        shown = "; ".join(f"{name}: {why}" for name, why in list(self.problems.items())[:_NAMED_AT_MOST])
        more = len(self.problems) - _NAMED_AT_MOST
        super().__init__(f"no plan: {shown}" + (f"; and {more} more" if more > 0 else ""))


@dataclass(frozen=True)
class View:
    """A strided part of a tensor, in elements; its elements have the order of a row-major walk through `shape`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        """As the tensor lies in its storage."""
        return cls(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def block(self) -> int:
        """Elements of one step along the first dimension: `part` cuts at multiples of it."""
        return math.prod(self.shape[1:])

    @property
    def is_contiguous(self) -> bool:
        merged = self.merged()
        return merged.strides in ((), (1,))

    def on(self, tensor: Tensor) -> Tensor:
        """This part of `tensor`."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)

    def merged(self) -> "View":
        """The same elements in the same order, in as few dimensions as can be."""
        dims = _merge([(size, (stride,)) for size, stride in zip(self.shape, self.strides, strict=True)])
        return View(self.offset, tuple(size for size, _ in dims), tuple(strides[0] for _, strides in dims))

    def part(self, start: int, stop: int) -> "View":
        """Elements `start` up to `stop` of the walk, both multiples of `block`."""
        if not self.shape:
            return self
        assert start % self.block == 0 and stop % self.block == 0  # noqa: PT018
        first, last = start // self.block, stop // self.block
        return View(self.offset + first * self.strides[0], (last - first, *self.shape[1:]), self.strides)

    def as_list(self) -> list[Any]:
        return [self.offset, list(self.shape), list(self.strides)]

    @classmethod
    def parse(cls, value: Sequence[Any]) -> "View":
        offset, shape, strides = value
        return cls(int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


@dataclass(frozen=True)
class Target:
    """A parameter of the engine rank, or a buffer that its loader fills."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Copy:
    """Elements `take` of the checkpoint's tensor `source`, in order, to the elements `put` of the parameter `target`.

    Where the dtypes differ, the copy casts, as the engine's loader does.
    """

    source: str
    take: View
    target: str
    put: View

    @property
    def numel(self) -> int:
        return self.take.numel


@dataclass(frozen=True)
class Plan:
    """All copies of one engine rank. No target element is written twice; those that none writes are zero (padding)."""

    sources: tuple[Slot, ...]
    targets: tuple[Target, ...]
    copies: tuple[Copy, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of the sources that the copies take: what this rank has to receive."""
        size = {slot.name: slot.dtype.itemsize for slot in self.sources}
        return sum(copy.numel * size[copy.source] for copy in self.copies)

    def padding(self) -> dict[str, int]:
        """Target → how many of its elements no copy writes, where there are any."""
        left = {target.name: target.numel for target in self.targets}
        for copy in self.copies:
            left[copy.target] -= copy.numel
        return {name: count for name, count in left.items() if count}

    def to_json(self) -> str:
        """The plan as one line of JSON, the same for equal plans."""
        number = {slot.name: index for index, slot in enumerate(self.sources)}
        place = {target.name: index for index, target in enumerate(self.targets)}
        value = {
            "sources": [[slot.name, dtype_name(slot.dtype), list(slot.shape)] for slot in self.sources],
            "targets": [[t.name, dtype_name(t.dtype), list(t.shape), list(t.strides)] for t in self.targets],
            "copies": [[number[c.source], c.take.as_list(), place[c.target], c.put.as_list()] for c in self.copies],
        }
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        value = json.loads(text)
        sources = [Slot(name, parse_dtype(dtype), tuple(shape)) for name, dtype, shape in value["sources"]]
        targets = [
            Target(name, parse_dtype(dtype), tuple(shape), tuple(strides))
            for name, dtype, shape, strides in value["targets"]
        ]
        copies = [
            Copy(sources[source].name, View.parse(take), targets[target].name, View.parse(put))
            for source, take, target, put in value["copies"]
        ]
        return cls(tuple(sources), tuple(targets), tuple(copies))


def make_plan(sources: Iterable[Slot], targets: Iterable[Target], copies: Iterable[Copy]) -> Plan:
    """A plan of these copies, of which a later one overrides an earlier one to the same place; merged.

    Sources that no copy takes are left out. Raises PlanRefused when two copies overlap otherwise.
    """
    final = {(copy.target, copy.put): copy for copy in map(normal, copies)}
    by_target: dict[str, list[Copy]] = defaultdict(list)
    for copy in final.values():
        by_target[copy.target].append(copy)
    targets = tuple(targets)
    problems = {}
    merged: dict[str, list[Copy]] = defaultdict(list)
    for target in targets:
        if overlap(target.numel, [copy.put for copy in by_target[target.name]]):
            problems[target.name] = "the loader writes some of its elements twice"
        for copy in join_all(by_target[target.name]):
            merged[copy.source].append(copy)
    if problems:
        raise PlanRefused(problems)
    used = tuple(slot for slot in sources if slot.name in merged)
    return Plan(used, targets, tuple(copy for slot in used for copy in merged[slot.name]))


def normal(copy: Copy) -> Copy:
    """The same copy, walked in the order of the target's memory, in as few dimensions as can be."""
    dims = [dim for dim in _dims(copy) if dim[0] != 1]
    dims = _merge(sorted(dims, key=lambda dim: dim[1], reverse=True))
    return _with_dims(copy, dims)


def join_all(copies: Iterable[Copy]) -> list[Copy]:
    """The copies, those that lie side by side in source and target made one."""
    joined: list[Copy] = []
    for copy in sorted(copies, key=lambda copy: (copy.source, copy.put.offset)):
        joined.append(copy)
        while len(joined) > 1 and (both := _join(joined[-2], joined[-1])) is not None:
            joined[-2:] = [both]
    return joined


def overlap(numel: int, views: Sequence[View]) -> bool:
    """Whether two of these parts of a tensor of `numel` elements share an element."""
    total = sum(view.numel for view in views)
    return total > numel or covered(numel, views) < total


@dataclass(frozen=True)
class Learned:
    """What a rank found out about its loader. plan: None where not even that can be said; problems: tensor → why there
    is none, or why parameters cannot be written in place by it."""

    plan: Plan | None
    problems: Mapping[str, str]


def covered(numel: int, views: Iterable[View]) -> int:
    """How many of a tensor's `numel` elements lie in at least one of these parts, which share no element each."""
    mask, unit = _mask(numel, views)
    return int(mask.count_nonzero()) * unit


def uncovered(numel: int, views: Iterable[View]) -> list[View]:
    """The rest of the tensor: runs of elements, one view for runs of one length at even distances."""
    mask, unit = _mask(numel, views)
    changes = torch.diff(mask.to(torch.int8), prepend=torch.tensor([1]), append=torch.tensor([1])).nonzero()[:, 0]
    runs = (changes.reshape(-1, 2) * unit).tolist()
    if not runs:
        return []
    start, length = runs[0][0], runs[0][1] - runs[0][0]
    stride = runs[1][0] - start if len(runs) > 1 else 0
    if all(run == [start + index * stride, start + index * stride + length] for index, run in enumerate(runs)):
        return [View(start, (len(runs), length), (stride, 1))]
    return [View(first, (last - first,), (1,)) for first, last in runs]


def _mask(numel: int, views: Iterable[View]) -> tuple[torch.Tensor, int]:
    """Which elements lie in one of the parts, of the blocks that all parts are made of, which is small where they are
    rows; and the size of a block."""
    flat = [View(view.offset, (*view.shape, 1), (*view.strides, 1)) for view in map(View.merged, views) if view.numel]
    flat = [View(v.offset, v.shape[:-1], v.strides[:-1]) if v.strides[-2:-1] == (1,) else v for v in flat]
    unit = math.gcd(numel, *(n for view in flat for n in (view.offset, view.shape[-1], *view.strides[:-1])))
    mask = torch.zeros(max(numel // max(unit, 1), 1), dtype=torch.bool)
    for view in flat:
        shape = (*view.shape[:-1], view.shape[-1] // unit)
        mask.as_strided(shape, (*(stride // unit for stride in view.strides[:-1]), 1), view.offset // unit).fill_(True)
    return mask, unit


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


_Dim = tuple[int, tuple[int, ...]]


def _merge(dims: Sequence[_Dim]) -> list[_Dim]:
    """Dimensions (size, strides) of which each neighbour that continues another in all its strides is made one."""
    merged: list[_Dim] = []
    for size, strides in dims:
        if size == 1:
            continue
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    return merged


def _join(first: Copy, second: Copy) -> Copy | None:
    """One copy for both, if `second` continues `first` along one dimension on both sides, or lies one element on.

    Blocks that are apart stay apart: ranks that share one of them would else take different slices.
    """
    if first.source != second.source or first.target != second.target:
        return None
    put, take = second.put.offset - first.put.offset, second.take.offset - first.take.offset
    one, two = _dims(first), _dims(second)
    for index, (size, strides) in enumerate(one):
        rest = [*one[:index], *one[index + 1 :]]
        if (put, take) != (size * strides[0], size * strides[1]):
            continue
        if two == rest:
            return normal(_with_dims(first, [*rest, (size + 1, strides)]))
        if len(two) == len(one) and two[index][1] == strides and [*two[:index], *two[index + 1 :]] == rest:
            return normal(_with_dims(first, [*rest, (size + two[index][0], strides)]))
    for index, (size, strides) in enumerate(two):
        if (put, take) == strides and [*two[:index], *two[index + 1 :]] == one:
            return normal(_with_dims(first, [*one, (1 + size, strides)]))
    if one == two and put > 0 and take > 0 and 1 in (put, take):
        return normal(_with_dims(first, [(2, (put, take)), *one]))
    return None


def _dims(copy: Copy) -> list[_Dim]:
    strides = zip(copy.put.shape, copy.put.strides, copy.take.strides, strict=True)
    return [(size, (put, take)) for size, put, take in strides]


def _with_dims(copy: Copy, dims: Sequence[_Dim]) -> Copy:
    shape = tuple(size for size, _ in dims)
    put = View(copy.put.offset, shape, tuple(strides[0] for _, strides in dims))
    take = View(copy.take.offset, shape, tuple(strides[1] for _, strides in dims))
    return Copy(copy.source, take, copy.target, put)

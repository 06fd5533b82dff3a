"""The proof of an update by plan: both sides hash each copy's elements, the engine where they went, the sender where
they came from.

It rests on the plan, which was held against the engine's loader, and on nothing that carries out an update: a fault of
schedule, packing, wire or spreading shows. Elements that no copy writes (padding) have to be zero.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from functional.engine import nh
from functional.engine.plan import Copy, Plan, uncovered
from functional.engine.proof import Proof, digests

if TYPE_CHECKING:
    from functional.engine import nh_triton


class RankProof:
    """What an engine rank holds, copy by copy of its plan."""

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        loaded: Proof,
        device: torch.device,
    ) -> None:
        """tensors: the rank's own, by target; buffers: what is in no checkpoint, by name, and `loaded` their proof. All
        keep their memory as long as this is used."""
        held = {target.name: tensors[target.name].detach() for target in plan.targets}
        self._hasher = Hasher([copy.put.merged().on(held[copy.target]) for copy in plan.copies], device)
        filled = {f"buffer {name}" for name in held}
        self._loaded = {name: proof.digest for name, proof in loaded.tensors.items() if name not in filled}
        self._key = loaded.key
        self._buffers = Hasher([buffers[name] for name in self._loaded], device)
        numel = {target.name: target.numel for target in plan.targets}
        self._padding = [
            (name, view.on(held[name]))
            for name in plan.padding()
            for view in uncovered(numel[name], [copy.put for copy in plan.copies if copy.target == name])
        ]

    def digests(self, key: nh.Key | None) -> list[str]:
        """Of each copy, in the plan's order; with `key`, or SHA-256."""
        return self._hasher.digests(key)

    def begin(self) -> None:
        """Start what needs no key, where that runs beside other work."""
        self._buffers.begin(self._key)

    def problems(self) -> list[str]:
        """Of what no copy writes: padding, and buffers, which must be as they were loaded."""
        found = [(name, padding.any()) for name, padding in self._padding]
        problems = [f"{name}: its padding is not zero" for name, is_set in found if is_set]
        now = self._buffers.digests(self._key)
        return problems + [
            f"{name}: changed since it was loaded"
            for (name, before), digest in zip(self._loaded.items(), now, strict=True)
            if digest != before
        ]


class SenderProof:
    """What all engine ranks must hold, from the tensors that were to be sent."""

    def __init__(self, plans: Mapping[int, Plan], sources: Mapping[str, Tensor], device: torch.device) -> None:
        """plans: by group rank; what several ranks hold is hashed once. sources: by the checkpoint's names; they must
        not change as long as this is used."""
        self._plans = plans
        self._place: dict[tuple[object, ...], int] = {}
        parts: list[Tensor] = []
        self._own: dict[str, list[int]] = {}  # plan's digest → where each of its copies' elements are hashed
        for plan in plans.values():
            if plan.digest not in self._own:
                dtypes = {target.name: target.dtype for target in plan.targets}
                self._own[plan.digest] = [
                    self._placed(copy, dtypes[copy.target], sources, parts) for copy in plan.copies
                ]
        self._hasher = Hasher(parts, device)

    def digests(self, key: nh.Key | None) -> dict[int, list[str]]:
        """As `RankProof.digests` must give them, by group rank."""
        found = self._hasher.digests(key)
        by_plan = {digest: [found[place] for place in places] for digest, places in self._own.items()}
        return {rank: by_plan[plan.digest] for rank, plan in self._plans.items()}

    def _placed(self, copy: Copy, dtype: torch.dtype, sources: Mapping[str, Tensor], parts: list[Tensor]) -> int:
        take = copy.take.merged()
        key = (copy.source, take, dtype)
        if key not in self._place:
            self._place[key] = len(parts)
            parts.append(take.on(sources[copy.source].detach()).to(dtype))
        return self._place[key]


class Hasher:
    """Digests of many tensors. Those that lie on the GPU `device` in one piece are found by one table, made once; of
    others a copy is made for each digest, 1 GiB at a time."""

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._parts = parts
        self._in_place = [
            index for index, part in enumerate(parts) if part.is_cuda and part.device == device and part.is_contiguous()
        ]
        self._others = sorted(set(range(len(parts))) - set(self._in_place))
        self._table = _table([parts[index] for index in self._in_place], device) if self._in_place else None
        self._begun: Tensor | None = None

    def begin(self, key: nh.Key | None) -> None:
        """Start to hash what is in place, behind what the stream has to do, for `digests` with this key."""
        if key is not None and self._table is not None:
            self._begun = self._table.start(key)

    def digests(self, key: nh.Key | None) -> list[str]:
        """Of each tensor, as it is now, or was when that began; with `key`, or SHA-256."""
        if key is None or self._table is None:
            return digests(self._parts, key, self._device)
        sums = self._table.start(key) if self._begun is None else self._begun
        self._begun = None
        found = dict(zip(self._others, digests([self._parts[i] for i in self._others], key, self._device), strict=True))
        found |= zip(self._in_place, nh.from_halves(sums), strict=True)
        return [found[index] for index in range(len(self._parts))]


def _table(parts: Sequence[Tensor], device: torch.device) -> "nh_triton.Table":
    from functional.engine import nh_triton  # needs Triton, and its users a GPU

    return nh_triton.Table([[part] for part in parts], device)


def differing(plan: Plan, expected: Sequence[str], seen: Sequence[str]) -> list[str]:
    """One line for each copy of which the rank holds other bytes."""
    if len(seen) != len(expected):
        return [f"{len(seen)} digests for {len(expected)} copies"]
    return [
        f"{copy.target}: the bytes of {copy.source} differ, hash {have[:12]}, expected {want[:12]}"
        for copy, want, have in zip(plan.copies, expected, seen, strict=True)
        if want != have
    ]

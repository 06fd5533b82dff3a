"""From the plans of all engine ranks: what the sender sends, in which order, to whom, and where each rank puts it.

A slice that several ranks take is sent once, to these ranks. Slices are packed into chunks, each for one set of ranks;
within a chunk every slice starts at a multiple of 16 bytes. Chunks come in the order of the sender's tensors, so that
it can go through them once.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from functional.engine.plan import Plan, View, covered, dtype_name, parse_dtype
from functional.engine.wire import Slot

_ALIGNMENT = 16
"""Bytes; device copies are fastest so, and every dtype's views are possible."""


@dataclass(frozen=True)
class Piece:
    """Elements `take` of the checkpoint's tensor `source`, in order, at byte `at` of the chunk."""

    source: str
    take: View
    at: int


@dataclass(frozen=True)
class Chunk:
    """Bytes that go to `ranks` (engine ranks, ascending) in one message."""

    ranks: tuple[int, ...]
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Placing:
    """The elements of dtype `dtype` at byte `at` of the chunk go, in order, to the elements `put` of `target`."""

    at: int
    dtype: torch.dtype
    target: str
    put: View


@dataclass(frozen=True)
class Arrival:
    """A chunk as one of its receivers sees it."""

    ranks: tuple[int, ...]
    nbytes: int
    placings: tuple[Placing, ...]


@dataclass(frozen=True)
class Intake:
    """All that one rank receives in an update, in order."""

    arrivals: tuple[Arrival, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(arrival.nbytes for arrival in self.arrivals)

    def to_json(self) -> str:
        """One line of JSON; target names are given once."""
        number: dict[str, int] = {}
        arrivals = [
            [
                list(arrival.ranks),
                arrival.nbytes,
                [
                    [p.at, dtype_name(p.dtype), number.setdefault(p.target, len(number)), p.put.as_list()]
                    for p in arrival.placings
                ],
            ]
            for arrival in self.arrivals
        ]
        return json.dumps({"targets": list(number), "arrivals": arrivals}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Intake":
        value = json.loads(text)
        targets: list[str] = value["targets"]
        return cls(tuple(_parse_arrival(arrival, targets) for arrival in value["arrivals"]))


@dataclass(frozen=True)
class Schedule:
    """`untaken`: tensor → how many of its elements no rank takes, where there are any.

    All of a tensor may be right (a tied head's). A part never is: the engine then computes with less than the trainer.
    """

    slots: tuple[Slot, ...]
    chunks: tuple[Chunk, ...]
    intakes: Mapping[int, Intake]
    untaken: Mapping[str, int]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all ranks' intakes: what each gets, and in which order."""
        parts = [f"{rank}:{self.intakes[rank].digest}" for rank in sorted(self.intakes)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes that leave the sender, each slice counted once."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def largest(self) -> int:
        """Bytes of the largest chunk: the size of a buffer."""
        return max((chunk.nbytes for chunk in self.chunks), default=0)


def make_schedule(plans: Mapping[int, Plan], slots: Sequence[Slot], chunk_bytes: int) -> Schedule:
    """plans: engine rank → its plan; slots: the sender's tensors, in its order; chunk_bytes: a chunk's size, which a
    slice that cannot be cut may exceed.

    Raises ValueError for a plan made of other tensors than the sender's.
    """
    _check_sources(plans, slots)
    open_chunks: dict[tuple[int, ...], _Open] = {}
    closed: list[_Open] = []
    wanted = _wanted(plans)
    for slot in slots:
        for take, takers in wanted[slot.name].items():
            ranks = tuple(sorted({rank for rank, _, _ in takers}))
            step = math.lcm(take.block, *(put.block for _, _, put in takers))
            start = 0
            while start < take.numel:
                chunk = open_chunks.setdefault(ranks, _Open(ranks))
                room = (chunk_bytes - chunk.end) // slot.dtype.itemsize // step * step
                if room <= 0 and chunk.pieces:
                    closed.append(open_chunks.pop(ranks))
                    continue
                stop = min(take.numel, start + max(room, step))
                chunk.add(slot, take.part(start, stop), [(r, t, put.part(start, stop)) for r, t, put in takers])
                start = stop
    closed += open_chunks.values()
    intakes = {rank: Intake(tuple(chunk.arrival(rank) for chunk in closed if rank in chunk.ranks)) for rank in plans}
    untaken = {}
    for slot in slots:
        numel = math.prod(slot.shape)
        if left := numel - covered(numel, wanted[slot.name]):
            untaken[slot.name] = left
    chunks = tuple(Chunk(chunk.ranks, chunk.nbytes, tuple(chunk.pieces)) for chunk in closed)
    return Schedule(tuple(slots), chunks, intakes, untaken)


def best_chunk_bytes(total: int, start_bytes: float, free: int) -> int:
    """The chunk size at which an update of `total` bytes takes least time, at most an eighth of `free` memory.

    start_bytes: how many bytes a device copies in the time that one chunk costs beside its bytes (start of a broadcast,
    launches). With chunks of c bytes, packing the first and spreading the last are not hidden behind the wire: as much
    as copying 2c. The chunks' own cost is total / c × start_bytes. The sum is least at c = √(total × start_bytes / 2).
    Two chunks are held at once, on either side.
    """
    best = math.sqrt(total * start_bytes / 2)
    size = int(min(max(best, _ALIGNMENT), max(free // 8, _ALIGNMENT), max(total, _ALIGNMENT)))
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_Taker = tuple[int, str, View]


@dataclass
class _Open:
    """A chunk that is being filled."""

    ranks: tuple[int, ...]
    nbytes: int = 0
    pieces: list[Piece] = field(default_factory=list)
    placings: dict[int, list[Placing]] = field(default_factory=lambda: defaultdict(list))

    @property
    def end(self) -> int:
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT

    def add(self, slot: Slot, take: View, takers: Sequence[_Taker]) -> None:
        at = self.end
        self.pieces.append(Piece(slot.name, take, at))
        for rank, target, put in takers:
            self.placings[rank].append(Placing(at, slot.dtype, target, put))
        self.nbytes = at + take.numel * slot.dtype.itemsize

    def arrival(self, rank: int) -> Arrival:
        return Arrival(self.ranks, self.nbytes, tuple(self.placings[rank]))


def _check_sources(plans: Mapping[int, Plan], slots: Sequence[Slot]) -> None:
    given = {slot.name: slot for slot in slots}
    for rank, plan in plans.items():
        for slot in plan.sources:
            if given.get(slot.name) != slot:
                raise ValueError(f"the plan of engine rank {rank} takes {slot}, the sender has {given.get(slot.name)}")


def _wanted(plans: Mapping[int, Plan]) -> dict[str, dict[View, list[_Taker]]]:
    """Source → slice of it → who takes it, and where to; slices in the order of their first element."""
    wanted: dict[str, dict[View, list[_Taker]]] = defaultdict(lambda: defaultdict(list))
    for rank, plan in plans.items():
        for copy in plan.copies:
            wanted[copy.source][copy.take.merged()].append((rank, copy.target, copy.put.merged()))
    return defaultdict(
        dict, {name: dict(sorted(takes.items(), key=lambda item: item[0].offset)) for name, takes in wanted.items()}
    )


def _parse_arrival(value: Sequence[Any], targets: Sequence[str]) -> Arrival:
    ranks, nbytes, placings = value
    return Arrival(
        tuple(ranks),
        nbytes,
        tuple(Placing(at, parse_dtype(dtype), targets[target], View.parse(put)) for at, dtype, target, put in placings),
    )

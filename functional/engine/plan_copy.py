"""How a plan is carried out: the sender packs slices into buffers, a rank spreads what came over its parameters.

Both are a few launches a chunk: the list of copies is made once, and `torch._foreach_copy_` takes it whole. Two buffers
take turns, so that one is packed, or spread, while the other is on the wire.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from functional.engine.errors import TransferError
from functional.engine.plan import View
from functional.engine.plan_schedule import Chunk, Intake, Schedule

BUFFERS = 2
_Lists = list[tuple[list[Tensor], list[Tensor]]]
"""Pairs of lists, what is written and what is read, each for one launch."""


def make_buffers(nbytes: int, device: torch.device) -> list[Tensor]:
    """The buffers of one side, each for the largest chunk."""
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]


class Spreader:
    """Copies what arrived into the parameters."""

    def __init__(self, intake: Intake, tensors: Mapping[str, Tensor], buffers: Sequence[Tensor]) -> None:
        """tensors: the rank's own, by target. They keep their memory as long as this is used, and so do the buffers."""
        self._intake = intake
        self._buffers = buffers
        self._lists: list[_Lists] = []
        for index, arrival in enumerate(intake.arrivals):
            buffer = self.buffer(index)
            pairs = []
            for placing in arrival.placings:
                into = _flat_if_contiguous(placing.put).on(tensors[placing.target].detach())
                pairs.append((into, _typed(buffer, placing.at, placing.dtype, into)))
            self._lists.append(_launches(pairs))

    def buffer(self, index: int) -> Tensor:
        """Where chunk `index` of this rank's has to arrive (uint8)."""
        return self._buffers[index % len(self._buffers)][: self._intake.arrivals[index].nbytes]

    def spread(self, index: int) -> None:
        """Start to copy chunk `index` into the parameters (on the current stream, if on a GPU)."""
        _copy(self._lists[index])


class Packer:
    """Gathers the slices of a chunk in a buffer."""

    def __init__(self, schedule: Schedule, buffers: Sequence[Tensor], *, resident: bool = False) -> None:
        """resident: the sender's tensors lie at the same place in every update, so that the list of copies may be kept.
        It keeps the tensors' memory too: not for gathered ones."""
        self._schedule = schedule
        self._buffers = buffers
        self._kept: dict[int, tuple[tuple[int, ...], _Lists]] | None = {} if resident else None

    def packed(
        self, named: Iterable[tuple[str, Tensor]], before: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Chunk, Tensor]]:
        """Index, chunk and buffer of each chunk in turn. `before` is called before a buffer is written: that of BUFFERS
        chunks ago, which must have left by then.

        Goes through `named` once, and to its end. A tensor is kept until the last chunk that has a slice of it.
        Raises TransferError for tensors that are not the schedule's.
        """
        given = _Given(self._schedule, named)
        for index, chunk in enumerate(self._schedule.chunks):
            sources = {piece.source: given.tensor(piece.source) for piece in chunk.pieces}
            buffer = self._buffers[index % len(self._buffers)]
            before()
            _copy(self._list(index, chunk, sources, buffer))
            given.drop(index)
            yield index, chunk, buffer[: chunk.nbytes]
        given.exhaust()

    def _list(self, index: int, chunk: Chunk, sources: Mapping[str, Tensor], buffer: Tensor) -> _Lists:
        where = tuple(tensor.data_ptr() for tensor in sources.values())
        if self._kept is not None and (kept := self._kept.get(index)) is not None and kept[0] == where:
            return kept[1]
        pairs = []
        for piece in chunk.pieces:
            source = sources[piece.source]
            out_of = _flat_if_contiguous(piece.take).on(source)
            pairs.append((_typed(buffer, piece.at, source.dtype, out_of), out_of))
        lists = _launches(pairs)
        if self._kept is not None:
            self._kept[index] = where, lists
        return lists


class _Given:
    """The sender's tensors, taken one after the other, kept while they are needed."""

    def __init__(self, schedule: Schedule, named: Iterable[tuple[str, Tensor]]) -> None:
        self._slots = iter(schedule.slots)
        self._named = iter(named)
        self._last = {piece.source: index for index, chunk in enumerate(schedule.chunks) for piece in chunk.pieces}
        self._ends: dict[int, list[str]] = defaultdict(list)
        for name, index in self._last.items():
            self._ends[index].append(name)
        self._held: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        while name not in self._held:
            self._take()
        return self._held[name]

    def drop(self, index: int) -> None:
        for name in self._ends[index]:
            del self._held[name]

    def exhaust(self) -> None:
        while self._take():
            pass

    def _take(self) -> bool:
        slot, item = next(self._slots, None), next(self._named, None)
        if slot is None and item is None:
            return False
        if slot is None:
            raise TransferError("more tensors given than the schedule names")
        if item is None:
            raise TransferError(f"tensors ended before {slot.name}")
        name, tensor = item
        if (name, tensor.dtype, tuple(tensor.shape)) != (slot.name, slot.dtype, slot.shape):
            raise TransferError(
                f"sending {name} {tensor.dtype} {tuple(tensor.shape)}, "
                f"but the schedule has {slot.name} {slot.dtype} {slot.shape}"
            )
        if name in self._last:
            self._held[name] = tensor.detach().contiguous()
        return True


def _flat_if_contiguous(view: View) -> View:
    """One dimension where that is possible: what the fast way of `_foreach_copy_` takes."""
    return View(view.offset, (view.numel,), (1,)) if view.is_contiguous else view


def _typed(buffer: Tensor, at: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    return buffer[at : at + like.numel() * dtype.itemsize].view(dtype).view(like.shape)


def _launches(pairs: Iterable[tuple[Tensor, Tensor]]) -> _Lists:
    """Grouped so that a strided copy does not put the contiguous ones on the slow way."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = defaultdict(
        lambda: ([], [])
    )
    for into, out_of in pairs:
        both = into.is_contiguous() and out_of.is_contiguous()
        written, read = groups[into.dtype, out_of.dtype, both]
        written.append(into)
        read.append(out_of)
    return list(groups.values())


def _copy(lists: _Lists) -> None:
    with torch.no_grad():
        for written, read in lists:
            torch._foreach_copy_(written, read)

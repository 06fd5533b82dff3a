"""Weights of a trainer of several ranks, gathered tensor by tensor: rank 0 sends them, the others take part.

For parameters that torch shards (FSDP2, tensor parallel: `DTensor`). All ranks gather the same tensors in the same
order, however far rank 0 gets with what it does with them.
"""

from collections.abc import Callable, Generator, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_RELEASE, _GATHER = 0, 1


class GatheredWeights:
    """Made on every rank of a group, alike. Rank 0 hands `weights` to a weight source; the others call `follow` when an
    update is due, and go on when rank 0 calls `release` after it."""

    def __init__(
        self,
        parameters: Callable[[], Iterable[tuple[str, Tensor]]],
        dtype: torch.dtype = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """parameters: checkpoint name and parameter, sharded or not, the same names in the same order on each rank.
        dtype: of what is sent. group: of the trainer's ranks; its words go over the CPU or the GPU as it does."""
        self._parameters = parameters
        self._dtype = dtype
        self._group = group
        self.passes = 0
        """How often the weights were gathered."""

    def weights(self) -> Generator[tuple[str, Tensor], None, None]:
        """On rank 0: checkpoint name and whole tensor of each weight. Where the iterator is left early, the rest is
        gathered all the same, and dropped: the other ranks are in the midst of it."""
        self._say(_GATHER)
        whole = self._gathered()
        try:
            for named in whole:  # noqa: UP028 (`yield from` would end it with this one)
                yield named
        finally:
            for _ in whole:
                pass

    def release(self) -> None:
        """On rank 0, when the update has come to its end: the other ranks' `follow` returns."""
        self._say(_RELEASE)

    def follow(self) -> None:
        """On the other ranks: take part in every pass of rank 0, until it lets go."""
        while self._say(None) == _GATHER:
            for _ in self._gathered():
                pass

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        self.passes += 1
        with torch.no_grad():
            for name, parameter in self._parameters():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                yield name, whole.to(self._dtype)

    def _say(self, word: int | None) -> int:
        """A word of rank 0's to all; None on those that only hear it."""
        on_gpu = dist.get_backend(self._group) == dist.Backend.NCCL
        said = torch.tensor([_RELEASE if word is None else word], device="cuda" if on_gpu else "cpu")
        dist.broadcast(said, group=self._group, group_src=0)
        return int(said.item())

"""A copy of weights in host memory, made beside other work: on a GPU into pinned memory, by a stream of its own."""

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopy:
    """Room for one copy, taken once: two bytes a parameter for bfloat16 weights."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError where the memory cannot be pinned."""
        self._source = dict(weights)
        first = next(iter(self._source.values()))
        self._stream = torch.cuda.Stream(first.device) if first.is_cuda else None
        self._done: torch.cuda.Event | None = None
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self._source.items()}
        self.nbytes = sum(sizes.values())
        room = torch.empty(sum(map(aligned, sizes.values())), dtype=torch.uint8)
        if self._stream is not None:
            pin(room)
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for name, tensor in self._source.items():
            self.tensors[name] = room[start : start + sizes[name]].view(tensor.dtype).view(tensor.shape)
            start += aligned(sizes[name])

    @torch.no_grad()
    def begin(self) -> None:
        """Start to copy what the weights hold now; they must not change until `wait` has returned."""
        if self._stream is None:
            self._copy()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._copy()
            self._done = self._stream.record_event()

    def wait(self) -> None:
        """Until the copy is whole."""
        if self._done is not None:
            self._done.synchronize()

    def _copy(self) -> None:
        for name, tensor in self._source.items():
            self.tensors[name].copy_(tensor, non_blocking=True)


def aligned(nbytes: int) -> int:
    """Up to the next multiple of 16, so that the next tensor is aligned for any dtype."""
    return -(-nbytes // 16) * 16


def pin(room: Tensor) -> None:
    """Page-lock memory that is there already: torch's own pinned memory is rounded up to a power of two."""
    status = torch.cuda.cudart().cudaHostRegister(room.data_ptr(), room.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(f"cannot pin {room.numel()} bytes of host memory for the snapshot: CUDA error {int(status)}")

"""The wire that both transports share: how named tensors become chunks of bytes, and back.

Packed geometry is that of vLLM 0.23.0 (`weight_transfer/packed_tensor.py`): tensors in order, raw bytes end to end,
a chunk closed by the tensor that takes it over the buffer size. Unpacked, every tensor is a chunk of its own.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional.engine.errors import TransferError
from functional.engine.group import Group

DEFAULT_BUFFER_BYTES = 256 * 1024 * 1024
DEFAULT_TIMEOUT_S = 60.0

Loader = Callable[[list[tuple[str, Tensor]]], Any]


@dataclass(frozen=True)
class Slot:
    """One tensor's place on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """Everything both sides must agree on before the first byte."""

    slots: tuple[Slot, ...]
    packed: bool
    buffer_bytes: int = DEFAULT_BUFFER_BYTES

    @classmethod
    def of(
        cls, named: Iterable[tuple[str, Tensor]], packed: bool, buffer_bytes: int = DEFAULT_BUFFER_BYTES
    ) -> "Manifest":
        slots = tuple(Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named)
        return cls(slots, packed, buffer_bytes)

    @classmethod
    def from_info(
        cls, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], packed: bool,
        packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> "Manifest":  # fmt: skip
        if not len(names) == len(dtype_names) == len(shapes):
            raise ValueError(
                f"names, dtype_names and shapes differ in length: {len(names)}, {len(dtype_names)}, {len(shapes)}"
            )
        slots = []
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name}: unknown dtype {dtype_name!r}")
            slots.append(Slot(name, dtype, tuple(shape)))
        return cls(tuple(slots), packed, packed_buffer_size_bytes)

    def info(self) -> dict[str, Any]:
        """The `update_info` to post to the worker."""
        return {
            "names": [slot.name for slot in self.slots],
            "dtype_names": [str(slot.dtype).removeprefix("torch.") for slot in self.slots],
            "shapes": [list(slot.shape) for slot in self.slots],
            "packed": self.packed,
            "packed_buffer_size_bytes": self.buffer_bytes,
        }

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.info()).encode()).hexdigest()

    def chunks(self) -> Iterator[list[Slot]]:
        """Slots by chunk, in order. Empty tensors ride along with their neighbours."""
        chunk: list[Slot] = []
        size = 0
        for slot in self.slots:
            chunk.append(slot)
            size += slot.nbytes
            if size > self.buffer_bytes or not self.packed:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)


def send(group: Group, manifest: Manifest, named: Iterable[tuple[str, Tensor]], timeout_s: float) -> None:
    """Broadcast tensors from rank 0; returns when every byte has left.

    Raises TransferTimeout at the deadline, TransferError for a broken peer or tensors that differ from the manifest.
    After either, the group is broken.
    """
    with group.transfer(timeout_s, manifest.digest()):
        tensors = iter(named)
        previous = None
        for chunk in manifest.chunks():
            buffer = _pack(chunk, tensors, group.device)
            pending = group.start(buffer)
            if previous is not None:
                group.wait(previous)
            previous = pending
        if next(tensors, None) is not None:
            raise TransferError("more tensors given than the manifest names")
        if previous is not None:
            group.wait(previous)


def receive(group: Group, manifest: Manifest, load: Loader, timeout_s: float) -> None:
    """Receive what rank 0 sends and hand it to `load`, chunk by chunk; the next chunk flies while one is loaded.

    `load` gets views of a receive buffer that is reused after it returns. Raises as `send` does, or what `load` raises.
    """
    with group.transfer(timeout_s, manifest.digest()):
        chunks = list(manifest.chunks())
        pending = group.start(_buffer(chunks[0], group.device)) if chunks else None
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            assert pending is not None
            group.wait(pending)
            current = pending.buffer
            pending = group.start(_buffer(following, group.device)) if following else None
            load(list(_unpack(chunk, current)))
            del current


def exchange(group: Group, manifest: Manifest, timeout_s: float) -> None:
    """Broadcast as many bytes as the manifest has, out of and into one buffer per rank that holds no tensor: what the
    transport alone takes, for benchmarks. Every rank calls it; it raises as `send` does."""
    with group.transfer(timeout_s, manifest.digest()):
        buffer = torch.empty(min(manifest.buffer_bytes, manifest.nbytes), dtype=torch.uint8, device=group.device)
        pending = [group.start(buffer[: manifest.nbytes - start]) for start in range(0, manifest.nbytes, len(buffer))]
        for one in pending:
            group.wait(one)


def _pack(chunk: list[Slot], tensors: Iterator[tuple[str, Tensor]], device: torch.device) -> Tensor:
    parts = []
    for slot in chunk:
        name, tensor = next(tensors, (None, None))
        if name is None or tensor is None:
            raise TransferError(f"tensors ended before {slot.name}")
        if (name, tensor.dtype, tuple(tensor.shape)) != (slot.name, slot.dtype, slot.shape):
            raise TransferError(
                f"sending {name} {tensor.dtype} {tuple(tensor.shape)}, "
                f"but the manifest has {slot.name} {slot.dtype} {slot.shape}"
            )
        parts.append(tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8))
    return torch.cat(parts)


def _unpack(chunk: list[Slot], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for slot in chunk:
        piece = buffer[start : start + slot.nbytes]
        if start % slot.dtype.itemsize:
            piece = piece.clone()  # a view needs an aligned start
        start += slot.nbytes
        yield slot.name, piece.view(slot.dtype).view(slot.shape)


def _buffer(chunk: list[Slot], device: torch.device) -> Tensor:
    return torch.empty(sum(slot.nbytes for slot in chunk), dtype=torch.uint8, device=device)

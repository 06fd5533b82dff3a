"""Proof of weights: a hash over every byte of every tensor, on what is resident, under its name, dtype and shape.

With a key it is the keyed hash of `nh`, computed where the tensors are; without one it is SHA-256, on the host.
"""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional.engine import nh
from functional.engine.errors import NOT_PROVED

_NAMED_AT_MOST = 3
_STAGING_BYTES = 16 * 1024 * 1024
_COPIED_BYTES = 1024**3
_of_thread = threading.local()


@dataclass(frozen=True)
class TensorProof:
    """What is claimed, or seen, of one tensor. nbytes: of its content; digest: SHA-256 or the keyed hash."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> "TensorProof":
        shape = tuple(int(size) for size in value["shape"])
        return cls(str(value["dtype"]), shape, int(value["nbytes"]), str(value["digest"]))

    @property
    def clear(self) -> tuple[str, tuple[int, ...], int]:
        """What is compared before the digest."""
        return self.dtype, self.shape, self.nbytes


@dataclass(frozen=True)
class Proof:
    """What a rank of an engine holds: each of its parameters by name. Digests are made with `key`; None: SHA-256."""

    key: nh.Key | None
    tensors: dict[str, TensorProof]


@dataclass(frozen=True)
class EngineProof:
    """What an engine must hold: for each of its ranks, in order, its parameters by name. `key` as in `Proof`."""

    key: nh.Key | None
    ranks: tuple[dict[str, TensorProof], ...]

    @property
    def parameters(self) -> int:
        """How many there are, on all ranks together."""
        return sum(map(len, self.ranks))

    @property
    def nbytes(self) -> list[int]:
        """Bytes that each rank holds."""
        return [sum(tensor.nbytes for tensor in rank.values()) for rank in self.ranks]

    def of_rank(self, rank: int, world_size: int) -> Proof:
        """What one rank must hold. Raises ValueError for another number of ranks."""
        if len(self.ranks) != world_size:
            raise ValueError(f"{NOT_PROVED}: the proof is of {len(self.ranks)} rank(s), the engine has {world_size}")
        return Proof(self.key, self.ranks[rank])

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> "EngineProof":
        """From `as_dict`. Raises ValueError, KeyError or TypeError for anything else."""
        key = None if value["key"] is None else nh.Key.parse(value["key"])
        ranks = [{name: TensorProof.parse(tensor) for name, tensor in rank.items()} for rank in value["ranks"]]
        return cls(key, tuple(ranks))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "key": None if self.key is None else self.key.hex(),
            "ranks": [{name: vars(tensor) for name, tensor in rank.items()} for rank in self.ranks],
        }


def prove_all(
    named: Iterable[tuple[str, Sequence[Tensor]]], key: nh.Key | None, device: torch.device | None = None
) -> dict[str, TensorProof]:
    """Proofs by name, of the tensors that the parts make when joined along their first dimension.

    device: a GPU to which tensors of the host, and strided ones, are copied for the keyed hash, 1 GiB at a time.
    """
    parts = {name: list(tensors) for name, tensors in named}
    if key is not None:
        digests = _keyed_digests(key, list(parts.values()), device)
        return {name: _proof(own, digest) for (name, own), digest in zip(parts.items(), digests, strict=True)}
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # hashlib lets others run
        running = {name: pool.submit(prove_tensor, *own) for name, own in parts.items()}
        return {name: result.result() for name, result in running.items()}


def digests(tensors: Sequence[Tensor], key: nh.Key | None, device: torch.device | None = None) -> list[str]:
    """Of each tensor's bytes. device: as for `prove_all`."""
    found = prove_all(((str(index), [tensor]) for index, tensor in enumerate(tensors)), key, device)
    return [proof.digest for proof in found.values()]


def prove_tensor(*parts: Tensor) -> TensorProof:
    """Proof by SHA-256 of the tensor that `parts` make when joined along their first dimension."""
    content = hashlib.sha256()
    for part in parts:
        for piece in _host_pieces(part):
            content.update(piece)
    return _proof(parts, content.hexdigest())


def _proof(parts: Sequence[Tensor], digest: str) -> TensorProof:
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            raise ValueError(f"parts do not join: {first.dtype} {tuple(first.shape)}, {part.dtype} {tuple(part.shape)}")
    shape = tuple(first.shape)
    if len(parts) > 1:
        shape = (sum(part.shape[0] for part in parts), *shape[1:])
    nbytes = sum(part.numel() * part.element_size() for part in parts)
    return TensorProof(str(first.dtype).removeprefix("torch."), shape, nbytes, digest)


def _keyed_digests(key: nh.Key, parameters: list[list[Tensor]], device: torch.device | None) -> list[str]:
    """On a GPU by one launch for all that is on it; elsewhere by the reference."""
    digests: dict[int, str] = {}
    for place, indices in _groups(parameters, device):
        group = [[part.to(place) for part in parameters[index]] for index in indices]
        if place.type == "cuda":
            from functional.engine import nh_triton  # needs Triton, and its users a GPU

            found = nh_triton.Table(group, place).digests(key)
        else:
            found = [nh.digest(key, *parts) for parts in group]
        digests |= zip(indices, found, strict=True)
    return [digests[index] for index in range(len(parameters))]


def _groups(parameters: list[list[Tensor]], device: torch.device | None) -> Iterator[tuple[torch.device, list[int]]]:
    """Which parameters are hashed together, and where; no group copies much more than `_COPIED_BYTES` there."""
    resident: dict[torch.device, list[int]] = {}
    copied: list[int] = []
    size = 0
    for index, parts in enumerate(parameters):
        place = parts[0].device
        is_copied = place.type == "cpu" or not all(part.is_contiguous() for part in parts)
        if device is None or device.type == "cpu" or not is_copied:
            resident.setdefault(place, []).append(index)
            continue
        copied.append(index)
        size += sum(part.numel() * part.element_size() for part in parts)
        if size > _COPIED_BYTES:
            yield device, copied
            copied, size = [], 0
    yield from resident.items()
    if device is not None and copied:
        yield device, copied


def _host_pieces(tensor: Tensor) -> Iterator[Any]:
    """The tensor's bytes, in order, as arrays in host memory; each is valid until the next is asked for.

    From a GPU they come through page-locked memory, on a stream of their own. A copy to pageable memory keeps the other
    streams waiting: beside such copies, sending 6.4 GB took 3.2 s instead of 0.01 on an H200, and hashing 4.4 s
    instead of 0.9.
    """
    if tensor.device.type != "cuda":
        yield tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        return
    if not hasattr(_of_thread, "staging"):
        _of_thread.staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, data.numel(), _STAGING_BYTES):
            piece = data[start : start + _STAGING_BYTES]
            staged = _of_thread.staging[: piece.numel()]
            staged.copy_(piece, non_blocking=True)
            stream.synchronize()
            yield staged.numpy()


def differences(expected: Mapping[str, TensorProof], seen: Mapping[str, TensorProof]) -> list[str]:
    """One line for each tensor that is missing, extra or different."""
    lines = [f"{name}: missing in the engine" for name in expected if name not in seen]
    lines += [f"{name}: in the engine, but not expected" for name in seen if name not in expected]
    for name, want in expected.items():
        have = seen.get(name)
        if have is None or have == want:
            continue
        if have.clear != want.clear:
            lines.append(
                f"{name}: {have.dtype} {have.shape} of {have.nbytes} bytes, "
                f"expected {want.dtype} {want.shape} of {want.nbytes}"
            )
        else:
            lines.append(f"{name}: bytes differ, hash {have.digest[:12]}, expected {want.digest[:12]}")
    return lines


def refuse(problems: Sequence[str], total: int, where: str = "") -> None:
    """Raises ValueError naming the first problems, and how many there are; nothing when there are none."""
    if problems:
        more = len(problems) - _NAMED_AT_MOST
        shown = "; ".join(problems[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"{where}{NOT_PROVED}, {len(problems)} problem(s) among {total} tensors: {shown}")

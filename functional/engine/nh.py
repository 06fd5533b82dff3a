"""A keyed universal hash of a tensor's bytes: its definition, the key, and a reference in plain torch.

The bytes, zero-padded, are blocks of 256 little-endian 32-bit words. Level one is NH: word i of a block is paired with
word i + 128, and lane l adds up (word + first[i + 4l]) × (its partner + second[i + 4l]), sums in parentheses modulo
2^32, the whole modulo 2^64. Level two is a polynomial modulo p = 2^61 − 1: lane l's digest is the sum over blocks b,
from 0, of its value times point[l]^(b + 1). docs/refit.md derives the chance that two contents are taken for one.

`nh_triton` computes the same on a GPU.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LANES = 4
BLOCK_BYTES = 1024
HALF_WORDS = BLOCK_BYTES // 8
LANE_SHIFT = 4
KEY_WORDS = HALF_WORDS + LANE_SHIFT * (LANES - 1)
"""Of each of the two key arrays. In one array for both, lanes would share words in a way the bound does not cover."""
P = 2**61 - 1

_LOW_32 = 2**32 - 1
_SLAB_BLOCKS = 4096


@dataclass(frozen=True)
class Key:
    """Drawn anew for each proof, after the last byte has been copied. first, second: 32-bit words; points: below p."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    points: tuple[int, ...]

    @classmethod
    def draw(cls) -> "Key":
        """From the operating system's generator."""
        words = _integers(os.urandom(8 * KEY_WORDS), 4)
        return cls(words[:KEY_WORDS], words[KEY_WORDS:], tuple(_draw_point() for _ in range(LANES)))

    @classmethod
    def parse(cls, text: str) -> "Key":
        """From `hex`. Raises ValueError for anything else."""
        data = bytes.fromhex(text)
        words, points = _integers(data[: 8 * KEY_WORDS], 4), _integers(data[8 * KEY_WORDS :], 8)
        if len(data) != 8 * KEY_WORDS + 8 * LANES or max(points) >= P:
            raise ValueError(f"no key of a proof: {len(data)} bytes")
        return cls(words[:KEY_WORDS], words[KEY_WORDS:], points)

    def hex(self) -> str:
        """The whole key as text."""
        words = b"".join(word.to_bytes(4, "little") for word in self.first + self.second)
        return (words + b"".join(point.to_bytes(8, "little") for point in self.points)).hex()


def digest(key: Key, *parts: Tensor) -> str:
    """Digest of the bytes of `parts`, one after the other: the reference, on whatever device they are."""
    data = as_bytes(parts[0]) if len(parts) == 1 else torch.cat([as_bytes(part) for part in parts])
    device = data.device
    words = torch.tensor([key.first, key.second], device=device)
    powers = _powers(key, min(_SLAB_BLOCKS, blocks_in(data.numel())), device)
    lanes = [0] * LANES
    for start in range(0, data.numel(), _SLAB_BLOCKS * BLOCK_BYTES):
        values = _level_one(_blocks(data[start : start + _SLAB_BLOCKS * BLOCK_BYTES]), words)
        weighted = _times(values, powers[: len(values)])
        high, low = (weighted >> 32).sum(0).tolist(), (weighted & _LOW_32).sum(0).tolist()
        for lane, point in enumerate(key.points):
            scale = pow(point, start // BLOCK_BYTES, P)
            lanes[lane] = (lanes[lane] + ((high[lane] << 32) + low[lane]) * scale) % P
    return as_text(lanes)


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, 1-d uint8: its own storage, or a copy where that is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def blocks_in(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def as_text(lanes: Sequence[int]) -> str:
    """A digest as 64 hexadecimal digits."""
    return "".join(f"{lane:016x}" for lane in lanes)


def from_halves(sums: Tensor) -> list[str]:
    """Digests of parameters, from low and high 32 bits, added up, of each lane: [parameters, 2, lanes] int64."""
    low, high = sums.cpu().numpy().astype(np.uint64).transpose(1, 0, 2)
    high %= P
    high = (high >> 29) + ((high & (2**29 - 1)) << 32)  # times 2^32
    text = ((low % P + high) % P).astype(">u8").tobytes().hex()
    width = 16 * LANES
    return [text[start : start + width] for start in range(0, len(text), width)]


def _integers(data: bytes, size: int) -> tuple[int, ...]:
    return tuple(int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size))


def _draw_point() -> int:
    """Uniform below p, by rejection."""
    while (point := int.from_bytes(os.urandom(8), "little") & P) == P:
        pass
    return point


def _blocks(data: Tensor) -> Tensor:
    """[n, 2, 128] int64: the words of each half of each block."""
    padding = blocks_in(data.numel()) * BLOCK_BYTES - data.numel()
    whole = torch.cat([data, data.new_zeros(padding)]).view(torch.int32)
    return whole.to(torch.int64).bitwise_and_(_LOW_32).reshape(-1, 2, HALF_WORDS)


def _level_one(blocks: Tensor, words: Tensor) -> Tensor:
    """[n, lanes] int64, below p: NH of each block, reduced. Products and sums wrap as unsigned 64-bit integers do."""
    values = []
    for lane in range(LANES):
        key = words[:, lane * LANE_SHIFT : lane * LANE_SHIFT + HALF_WORDS]
        added = (blocks + key) & _LOW_32
        values.append((added[:, 0] * added[:, 1]).sum(1))
    nh = torch.stack(values, 1)
    return _reduced((nh & P) + ((nh >> 61) & 7))


def _powers(key: Key, count: int, device: torch.device) -> Tensor:
    """[count, lanes] int64: point^1 to point^count."""
    powers = torch.tensor([key.points], device=device)
    while len(powers) < count:
        powers = torch.cat([powers, _times(powers, powers[-1:])])
    return powers[:count]


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a × b modulo p, of int64 below p, by halves of 30 and 31 bits so that no sum reaches 2^63."""
    a_high, a_low, b_high, b_low = a >> 31, a & (2**31 - 1), b >> 31, b & (2**31 - 1)
    middle = a_high * b_low + a_low * b_high
    total = 2 * a_high * b_high + (middle >> 30) + ((middle & (2**30 - 1)) << 31) + a_low * b_low
    return _reduced((total & P) + (total >> 61))


def _reduced(value: Tensor) -> Tensor:
    """Below p, of values below 2p."""
    return torch.where(value >= P, value - P, value)

"""The hash of `nh` on a GPU, at the speed of the memory: two launches over tables of addresses, whatever the model.

The first takes whole tiles of 32 blocks at addresses that are multiples of 16, and reads words; the second takes all
else, and reads bytes. A program hashes up to 256 blocks of one contiguous piece, and adds their share of the polynomial
to the parameter's sums. With TRITON_INTERPRET=1 the kernel runs on CPU, for tests.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional.engine import nh

_TILE_BLOCKS = 32
_COLUMNS = 16
"""Words of each half-block read at a time."""
_TILE_BYTES = _TILE_BLOCKS * nh.BLOCK_BYTES
_TILES = 8
"""Tiles of one program."""
_POSITION_BITS = 48
"""Of a block's number within its parameter."""
_WARPS = 4


@dataclass(frozen=True)
class _Piece:
    """Contiguous bytes of parameter `target`, from its block `first_block` on."""

    target: int
    first_block: int
    data: Tensor

    @property
    def in_words(self) -> bool:
        return self.data.data_ptr() % 16 == 0 and self.data.numel() % _TILE_BYTES == 0

    @property
    def chunks(self) -> int:
        return -(-self.data.numel() // (_TILES * _TILE_BYTES))


class Table:
    """Where the bytes of parameters are, each given as the parts that make it when joined; all of them on `device`.

    Of a tensor that is not contiguous, and of parts that end within a block, a copy is made here.
    """

    def __init__(self, parameters: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        pieces = [piece for target, parts in enumerate(parameters) for piece in _pieces(target, parts)]
        self._device = device
        self._parameters = len(parameters)
        self._rows = [
            _Rows([p for p in pieces if p.in_words is in_words], in_words, device) for in_words in (True, False)
        ]

    def digests(self, key: nh.Key) -> list[str]:
        """Of each parameter, as it is now."""
        return nh.from_halves(self.start(key))

    def start(self, key: nh.Key) -> Tensor:
        """The same, not waited for: low and high 32 bits, added up, of each lane, [parameters, 2, lanes] int64."""
        sums = torch.zeros(self._parameters, 2, nh.LANES, dtype=torch.int64, device=self._device)
        words, weights = _on_device(key, self._device)
        for rows in self._rows:
            rows.launch(words, weights, sums)
        return sums


def check(device: torch.device) -> None:
    """Compile the kernel, and hold it against the reference on `device`. Raises RuntimeError where either fails."""
    key = nh.Key.draw()
    data = torch.arange(3 * _TILES * _TILE_BYTES // 2 + 3, device=device).to(torch.uint8)
    samples = [[data], [data[1:]], [data[: 5 * nh.BLOCK_BYTES], data[2:]], [data[:0]]]
    try:
        found = Table(samples, device).digests(key)
    except Exception as error:  # no compiler for the launcher, say
        raise RuntimeError(f"no keyed hash on {device}: {error}; or set dynamo_cfg.proof=sha256") from error
    if found != [nh.digest(key, *parts) for parts in samples]:
        raise RuntimeError(f"the hash computed on {device} is not that of the reference: set dynamo_cfg.proof=sha256")


class _Rows:
    """The pieces of one launch."""

    def __init__(self, pieces: list[_Piece], in_words: bool, device: torch.device) -> None:
        self._pieces = pieces  # whose memory must stay theirs
        self._in_words = in_words
        chunks = torch.tensor([piece.chunks for piece in pieces], dtype=torch.int64)
        firsts = (chunks.cumsum(0) - chunks).tolist()
        rows = [
            (p.data.data_ptr(), p.data.numel(), p.first_block, p.target, f) for p, f in zip(pieces, firsts, strict=True)
        ]
        self._table = torch.tensor(rows, dtype=torch.int64).to(device)
        self._piece_of = torch.repeat_interleave(torch.arange(len(pieces), dtype=torch.int32), chunks).to(device)

    def launch(self, words: Tensor, weights: Tensor, sums: Tensor) -> None:
        if not self._pieces:
            return
        with torch.cuda.device(sums.device) if sums.is_cuda else contextlib.nullcontext():
            _hash[(len(self._piece_of),)](
                self._table,
                self._piece_of,
                words,
                weights,
                sums,
                IN_WORDS=self._in_words,
                TILE=_TILE_BLOCKS,
                TILES=_TILES,
                COLUMNS=_COLUMNS,
                HALF=nh.HALF_WORDS,
                LANES=nh.LANES,
                SHIFT=nh.LANE_SHIFT,
                KEY=nh.KEY_WORDS,
                P=nh.P,
                num_warps=_WARPS,
            )


def _pieces(target: int, parts: Sequence[Tensor]) -> Iterator[_Piece]:
    """Parts of whole blocks stay where they are, others are joined first; what does not fill a tile is a piece of its
    own."""
    data = [nh.as_bytes(part) for part in parts]
    if any(part.numel() % nh.BLOCK_BYTES for part in data[:-1]):
        data = [torch.cat(data)]
    first_block = 0
    for part in data:
        whole = part.numel() // _TILE_BYTES * _TILE_BYTES
        for piece in (part[:whole], part[whole:]):
            if piece.numel():
                yield _Piece(target, first_block, piece)
            first_block += piece.numel() // nh.BLOCK_BYTES


@lru_cache(maxsize=2)  # the proof's, and the one that an engine keeps for its buffers
def _on_device(key: nh.Key, device: torch.device) -> tuple[Tensor, Tensor]:
    """Words of the key, [2 * KEY_WORDS] uint32, and powers of its points, then squares, [rows, lanes] int64."""
    words = torch.tensor([*key.first, *key.second]).to(torch.uint32).to(device)
    weights = torch.tensor([*_powers(key.points, _TILES * _TILE_BLOCKS), *_squares(key.points, _POSITION_BITS)])
    return words, weights.to(device)


def _powers(points: Sequence[int], count: int) -> Iterator[list[int]]:
    """Each point to the power of 1 to `count`."""
    row = list(points)
    for _ in range(count):
        yield row
        row = [value * point % nh.P for value, point in zip(row, points, strict=True)]


def _squares(points: Sequence[int], count: int) -> Iterator[list[int]]:
    """Each point to the power of 1, 2, 4 and so on."""
    row = list(points)
    for _ in range(count):
        yield row
        row = [value * value % nh.P for value in row]


@triton.jit
def _hash(
    table: tl.tensor, piece_of: tl.tensor, words: tl.tensor, weights: tl.tensor, sums: tl.tensor,
    IN_WORDS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr,
    LANES: tl.constexpr, SHIFT: tl.constexpr, KEY: tl.constexpr, P: tl.constexpr,
) -> None:  # fmt: skip
    """IN_WORDS: pieces begin at multiples of 16 and are whole tiles; others are read byte by byte.

    table: rows of address, bytes, first block, parameter, first chunk, [n, 5] int64; piece_of: a chunk's row.

    words: both arrays of the key; weights: [TILE * TILES powers, then squares; LANES]; sums: low and high 32 bits of
    the digests, added up, [parameters, 2, LANES] int64.
    """
    chunk = tl.program_id(0)
    row = table + tl.load(piece_of + chunk) * 5
    start = (chunk - tl.load(row + 4)) * (TILE * TILES)
    begin = tl.load(row) + start * (HALF * 8)
    left = tl.load(row + 1) - start * (HALF * 8)
    position = tl.load(row + 2) + start
    tiles = tl.minimum(TILES, tl.cdiv(left, TILE * HALF * 8))
    total = tl.zeros([TILE, LANES], tl.uint64)
    tile = tl.zeros_like(tiles)
    while tile < tiles:
        there = left - tile * (TILE * HALF * 8)
        here = begin + tile * (TILE * HALF * 8)
        values = _level_one(here, there, words, IN_WORDS, TILE, COLUMNS, HALF, SHIFT, KEY)
        values = _reduced((values & P) + (values >> 61), P)
        block = tl.arange(0, TILE)[:, None]
        power = weights + (tile * TILE + block) * LANES + tl.arange(0, LANES)[None, :]
        power = tl.load(power, mask=block * HALF * 8 < there, other=0).to(tl.uint64)
        total = _reduced(total + _times(values, power, P), P)
        tile += 1
    share = _folded(tl.sum(total & 0xFFFFFFFF, 0), tl.sum(total >> 32, 0), P)
    lanes = tl.arange(0, LANES)
    squares = weights + TILE * TILES * LANES + lanes
    while position > 0:
        share = tl.where((position & 1) == 1, _times(share, tl.load(squares).to(tl.uint64), P), share)
        position >>= 1
        squares += LANES
    target = sums + tl.load(row + 3) * 2 * LANES + lanes
    tl.atomic_add(target, (share & 0xFFFFFFFF).to(tl.int64), sem="relaxed")
    tl.atomic_add(target + LANES, (share >> 32).to(tl.int64), sem="relaxed")


@triton.jit
def _level_one(
    address: tl.tensor, left: tl.tensor, words: tl.tensor, IN_WORDS: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, SHIFT: tl.constexpr, KEY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """NH of each block, [TILE, 4] uint64."""
    v0 = tl.zeros([TILE, COLUMNS], tl.uint64)
    v1 = tl.zeros([TILE, COLUMNS], tl.uint64)
    v2 = tl.zeros([TILE, COLUMNS], tl.uint64)
    v3 = tl.zeros([TILE, COLUMNS], tl.uint64)
    for column in range(0, HALF, COLUMNS):
        if IN_WORDS:
            at = tl.arange(0, TILE)[:, None] * HALF * 2 + column + tl.arange(0, COLUMNS)[None, :]
            data = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
            first = tl.load(data + at)
            second = tl.load(data + at + HALF)
        else:
            first = _from_bytes(address, column * 4, left, TILE, COLUMNS, HALF)
            second = _from_bytes(address, (column + HALF) * 4, left, TILE, COLUMNS, HALF)
        key = words + column + tl.arange(0, COLUMNS)
        v0 += _products(first, second, key, KEY)
        v1 += _products(first, second, key + SHIFT, KEY)
        v2 += _products(first, second, key + SHIFT * 2, KEY)
        v3 += _products(first, second, key + SHIFT * 3, KEY)
    even, odd = tl.join(tl.sum(v0, 1), tl.sum(v2, 1)), tl.join(tl.sum(v1, 1), tl.sum(v3, 1))
    return tl.reshape(tl.join(even, odd), [TILE, 4])


@triton.jit
def _products(first: tl.tensor, second: tl.tensor, key: tl.tensor, KEY: tl.constexpr) -> tl.tensor:
    a = (first + tl.load(key)[None, :]).to(tl.uint64)
    b = (second + tl.load(key + KEY)[None, :]).to(tl.uint64)
    return a * b


@triton.jit
def _from_bytes(
    address: tl.tensor, offset: tl.tensor, left: tl.tensor,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Words at `offset` of each block, [TILE, COLUMNS] uint32; zeros from byte `left` of the tile on."""
    at = tl.arange(0, TILE)[:, None] * HALF * 8 + offset + tl.arange(0, COLUMNS * 4)[None, :]
    data = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=at < left, other=0).to(tl.uint32)
    return tl.sum(tl.reshape(data, [TILE, COLUMNS, 4]) << (tl.arange(0, 4) * 8)[None, None, :].to(tl.uint32), 2)


@triton.jit
def _times(a: tl.tensor, b: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """a × b modulo p, below p, of uint64 below p."""
    low = a * b
    return _reduced((low & P) + ((tl.umulhi(a, b) << 3) | (low >> 61)), P)


@triton.jit
def _folded(low: tl.tensor, high: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """low + high × 2^32 modulo p, below p, of sums of at most 2^28 halves."""
    value = (low & P) + (high >> 29) + ((high & 0x1FFFFFFF) << 32)
    value = (value & P) + (value >> 61)
    return _reduced(value, P)


@triton.jit
def _reduced(value: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """Below p, of values below 2p."""
    return tl.where(value >= P, value - P, value)

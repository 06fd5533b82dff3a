"""The data area of a squashfs: files cut into blocks, small files packed into fragments, compressed on all cores.

What is written depends on the order in which files are added, and on nothing else: results are taken in that order,
however many threads made them. A file whose blocks equal an earlier file's is stored once.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

from isal import isal_zlib

from sqsh.compress import Compressor

RAW = 1 << 24  # a block's size with this bit: stored as it is
JOB_SIZE = 1 << 20  # bytes that one job compresses, at least a block
PENDING_SIZE = 48 << 20  # bytes waiting for a compressor or for the disk
SYNC_SIZE = 128 << 20  # write back in the background after so many bytes, so that the last sync has little to do
# A fragment ends when it is full, or after a file whose hash begins with a byte below this. So a file that comes or
# goes changes the fragments near it, not all that follow, and the others can be copied from an earlier output.
CUT_BELOW = 6

Block = bytes | memoryview


class FileData:
    """Where a file's content lies. `key` tells equal contents apart from others; `sums` are check sums of
    its blocks as they are stored."""

    __slots__ = ("fragment", "key", "offset", "size", "sizes", "sparse", "start", "sums")

    def __init__(self, size: int) -> None:
        self.size = size
        self.start = 0
        self.sizes: list[int] = []
        self.sums: list[int] = []
        self.sparse = 0
        self.fragment = -1
        self.offset = 0
        self.key = b""

    @property
    def stored(self) -> int:
        return sum(size & (RAW - 1) for size in self.sizes)


class Fragment(NamedTuple):
    """Where it lies, its size word, the check sum of its stored bytes, and the size of its content."""

    start: int
    word: int
    sum: int
    size: int


class Earlier:
    """An earlier output whose blocks can be copied; see cache.py."""

    def __init__(self, handle: int, compressor: Compressor, fragments: Mapping[int, Fragment]) -> None:
        self.handle = handle
        self.fragments = fragments
        self._compressor = compressor
        self._last: tuple[int, bytes] = (-1, b"")

    def packed_fragment(self, number: int) -> bytes:
        old = self.fragments[number]
        data = os.pread(self.handle, old.word & (RAW - 1), old.start)
        if isal_zlib.crc32(data) != old.sum:
            raise Changed
        return data

    def fragment(self, number: int) -> bytes:
        if self._last[0] != number:
            data = self.packed_fragment(number)
            raw = self.fragments[number].word & RAW
            self._last = (number, data if raw else self._compressor.unpack(data))
        return self._last[1]


class Changed(Exception):  # noqa: N818
    """An earlier output is no longer what the index says."""


class _Piece:
    """A small file in the fragment that is being filled: its bytes, or where an earlier output has them."""

    __slots__ = ("earlier", "fragment", "offset", "raw", "size")

    def __init__(self, size: int, raw: bytes | None, earlier: Earlier | None, fragment: int, offset: int) -> None:
        self.size = size
        self.raw = raw
        self.earlier = earlier
        self.fragment = fragment
        self.offset = offset


Packed = tuple[list[int], list[int], Sequence[Block]]  # size words, check sums, stored bytes


class DataArea:
    """Writes to `handle` from `start` on."""

    def __init__(self, handle: int, start: int, compressor: Compressor, block_size: int, threads: int) -> None:
        self.position = start
        self.fragments: list[Fragment] = []
        self.block_size = block_size
        self._handle = handle
        self._compressor = compressor
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compress")
        self._jobs: deque[tuple[Callable[[Packed], None], Future[Packed], int]] = deque()
        self._pending = 0
        self._pieces: list[_Piece] = []
        self._filled = 0
        self._fragment_count = 0
        self._small: dict[bytes, FileData] = {}
        self._large: dict[tuple[int, int, int], list[FileData]] = {}
        self._sync = _BackgroundSync(handle)
        self._zero_sums: dict[int, int] = {}

    def __enter__(self) -> DataArea:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._sync.close()

    def add(self, size: int, blocks: Iterable[Block]) -> FileData:
        """Take a file of `size` bytes in, given as blocks of `block_size`."""
        if size == 0:
            return FileData(0)
        if size < self.block_size:
            (content,) = blocks
            return self._add_small(bytes(content))
        data = FileData(size)
        batch: list[Block] = []
        held = 0
        for block in blocks:
            batch.append(block)
            held += len(block)
            if held >= JOB_SIZE:
                self._compress(data, batch, held)
                batch, held = [], 0
        if batch:
            self._compress(data, batch, held)
        self._then(lambda _: self._finish(data))
        return data

    def add_earlier(self, old: FileData, earlier: Earlier) -> FileData:
        """Take in a file that an earlier output has: the same result as `add` of its content, without compressing."""
        if old.size == 0:
            return FileData(0)
        if old.fragment >= 0:
            return self._pack(old.size, old.key, _Piece(old.size, None, earlier, old.fragment, old.offset))
        data = FileData(old.size)
        at = old.start
        first = 0
        while first < len(old.sizes):
            last, length = first, 0
            while last < len(old.sizes) and length < JOB_SIZE:
                length += old.sizes[last] & (RAW - 1)
                last += 1
            sizes, sums = old.sizes[first:last], old.sums[first:last]
            self._submit(lambda packed: self._append(data, packed), length, _copy, earlier, at, sizes, sums)
            at += length
            first = last
        self._then(lambda _: self._finish(data))
        return data

    def end_layer(self) -> None:
        """Begin a new fragment, so that one layer's files never share one with another's."""
        self._flush()

    def finish(self) -> None:
        """Write out whatever is still on its way."""
        self._flush()
        while self._jobs:
            self._take_one()
        self._sync.check()

    def _add_small(self, content: bytes) -> FileData:
        key = hashlib.sha256(content).digest()
        return self._pack(len(content), key, _Piece(len(content), content, None, 0, 0))

    def _pack(self, size: int, key: bytes, piece: _Piece) -> FileData:
        known = self._small.get(key)
        if known is not None:
            return known
        if self._filled + size > self.block_size:
            self._flush()
        data = self._small[key] = FileData(size)
        data.key = key
        data.fragment = self._fragment_count
        data.offset = self._filled
        self._pieces.append(piece)
        self._filled += size
        if key[0] < CUT_BELOW:
            self._flush()
        return data

    def _flush(self) -> None:
        if not self._pieces:
            return
        pieces, size = self._pieces, self._filled
        self._pieces, self._filled = [], 0
        self._fragment_count += 1
        if (whole := _whole_fragment(pieces)) is not None:
            earlier, number = whole
            if earlier.fragments[number].size == size:
                self._submit(self._appender(size), size, _copy_fragment, earlier, number)
                return
        content = b"".join([_content(piece) for piece in pieces])
        self._submit(self._appender(size), size, self._pack_blocks, [content], False)

    def _appender(self, size: int) -> Callable[[Packed], None]:
        return lambda packed: self._append_fragment(packed, size)

    def _compress(self, data: FileData, batch: list[Block], held: int) -> None:
        self._submit(lambda packed: self._append(data, packed), held, self._pack_blocks, batch, True)

    def _pack_blocks(self, blocks: list[Block], holes: bool) -> Packed:
        """In a thread: compress each block, or keep it as it is where that is no smaller."""
        sizes: list[int] = []
        sums: list[int] = []
        stored: list[Block] = []
        pack = self._compressor.packer()
        for block in blocks:
            if holes and isal_zlib.crc32(block) == self._zero_sum(len(block)) and _is_zero(block):
                sizes.append(0)
                sums.append(0)
                continue
            packed = pack(block)
            if len(packed) < len(block):
                sizes.append(len(packed))
            else:
                packed = bytes(block)
                sizes.append(len(block) | RAW)
            sums.append(isal_zlib.crc32(packed))
            stored.append(packed)
        return sizes, sums, stored

    def _zero_sum(self, size: int) -> int:
        if size not in self._zero_sums:
            self._zero_sums[size] = isal_zlib.crc32(bytes(size))
        return self._zero_sums[size]

    def _submit(self, done: Callable[[Packed], None], size: int, work: Callable[..., Packed], *words: object) -> None:
        while self._pending > PENDING_SIZE:
            self._take_one()
        self._pending += size
        self._jobs.append((done, self._pool.submit(work, *words), size))
        while self._jobs and self._jobs[0][1].done():
            self._take_one()

    def _then(self, done: Callable[[Packed], None]) -> None:
        ready: Future[Packed] = Future()
        ready.set_result(([], [], []))
        self._jobs.append((done, ready, 0))

    def _take_one(self) -> None:
        done, future, size = self._jobs.popleft()
        self._pending -= size
        done(future.result())

    def _append(self, data: FileData, packed: Packed) -> None:
        sizes, sums, stored = packed
        if not data.sizes:
            data.start = self.position
        missing = len(data.sizes) * self.block_size
        data.sizes += sizes
        data.sums += sums
        if 0 in sizes:
            for place, word in enumerate(sizes):
                if word == 0:
                    data.sparse += min(self.block_size, data.size - missing - place * self.block_size)
        self._write(stored)

    def _append_fragment(self, packed: Packed, size: int) -> None:
        sizes, sums, stored = packed
        self.fragments.append(Fragment(self.position, sizes[0], sums[0], size))
        self._write(stored)

    def _finish(self, data: FileData) -> None:
        """The file is written: if an earlier one has the very same blocks, take it back."""
        stored = data.stored
        if not stored:
            data.start = 0
            return
        twins = self._large.setdefault((data.size, stored, isal_zlib.crc32(repr(data.sums).encode())), [])
        for twin in twins:
            if twin.sizes == data.sizes and self._same(twin.start, data.start, stored):
                self.position = data.start
                data.start = twin.start
                return
        twins.append(data)

    def _same(self, one: int, other: int, size: int) -> bool:
        for at in range(0, size, JOB_SIZE):
            count = min(JOB_SIZE, size - at)
            if os.pread(self._handle, count, one + at) != os.pread(self._handle, count, other + at):
                return False
        return True

    def _write(self, stored: Sequence[Block]) -> None:
        self.position += write_all(self._handle, stored, self.position)
        self._sync.wrote(self.position)


class _BackgroundSync:
    """Has the kernel write back what was written while the rest is made."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._synced = 0
        self._busy: threading.Thread | None = None
        self._error: OSError | None = None

    def wrote(self, position: int) -> None:
        if position - self._synced >= SYNC_SIZE and (self._busy is None or not self._busy.is_alive()):
            self.check()
            self._synced = position
            self._busy = threading.Thread(target=self._sync, name="sync", daemon=True)
            self._busy.start()

    def check(self) -> None:
        """Wait for what is on its way and raise what the kernel said: it says so once only."""
        self.close()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._busy is not None:
            self._busy.join()

    def _sync(self) -> None:
        try:
            os.fdatasync(self._handle)
        except OSError as error:
            self._error = error


def write_all(handle: int, parts: Sequence[Block], position: int) -> int:
    """Write all parts one after the other at `position`; the answer is their size."""
    total = sum(map(len, parts))
    written = os.pwritev(handle, parts[:1000], position) if parts else 0
    if written < total:
        rest = memoryview(b"".join(parts))[written:]
        while rest:
            count = os.pwrite(handle, rest, position + total - len(rest))
            rest = rest[count:]
    return total


def _copy(earlier: Earlier, start: int, sizes: list[int], sums: list[int]) -> Packed:
    """In a thread: blocks as an earlier output has them, if it still has them."""
    data = memoryview(os.pread(earlier.handle, sum(size & (RAW - 1) for size in sizes), start))
    at = 0
    for word, total in zip(sizes, sums, strict=True):
        size = word & (RAW - 1)
        if size and isal_zlib.crc32(data[at : at + size]) != total:
            raise Changed
        at += size
    return sizes, sums, [data] if data else []


def _is_zero(block: Block) -> bool:
    return bytes(block).count(0) == len(block)


def _copy_fragment(earlier: Earlier, number: int) -> Packed:
    old = earlier.fragments[number]
    return [old.word], [old.sum], [earlier.packed_fragment(number)]


def _whole_fragment(pieces: list[_Piece]) -> tuple[Earlier, int] | None:
    """The earlier fragment that these pieces are the beginning of, in order."""
    first = pieces[0]
    offset = 0
    for piece in pieces:
        if piece.earlier is None or piece.earlier is not first.earlier or piece.fragment != first.fragment:
            return None
        if piece.offset != offset:
            return None
        offset += piece.size
    assert first.earlier is not None
    return first.earlier, first.fragment


def _content(piece: _Piece) -> bytes:
    if piece.raw is not None:
        return piece.raw
    assert piece.earlier is not None
    return piece.earlier.fragment(piece.fragment)[piece.offset : piece.offset + piece.size]

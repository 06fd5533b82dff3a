"""The data area of a squashfs: files cut into blocks, small files packed into fragments, compressed on all cores.

What is written depends on the order in which files are added, and on nothing else: results are taken in that order,
however many threads made them. A file whose blocks equal an earlier file's is stored once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from isal import isal_zlib

from sqsh.cancel import Cancel
from sqsh.compress import Block, Compressor
from sqsh.earlier import Earlier
from sqsh.file_data import RAW, FileData, Fragment
from sqsh.writer import Run, Writer

JOB_SIZE = 1 << 20  # bytes that one job compresses, at least a block
PENDING_SIZE = 128 << 20  # bytes waiting for a compressor
COPY_SIZE = 32 << 20  # bytes of an earlier output to be copied by one request, and a block more
# A fragment ends when it is full, or after a file whose hash begins with a byte below this. So a file that comes or
# goes changes the fragments near it, not all that follow, and the others can be copied from an earlier output.
CUT_BELOW = 6


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

    def __init__(
        self, handle: int, start: int, compressor: Compressor, block_size: int, threads: int, cancel: Cancel
    ) -> None:
        self.position = start
        self.fragments: list[Fragment] = []
        self.block_size = block_size
        self._handle = handle
        self._compressor = compressor
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compress", initializer=_give_way)
        self._jobs: deque[tuple[Callable[[Packed], None], Future[Packed], int]] = deque()
        self._pending = 0
        self._pieces: list[_Piece] = []
        self._filled = 0
        self._fragment_count = 0
        self._small: dict[bytes, FileData] = {}
        self._copied: dict[tuple[int, int, int], FileData] = {}  # by where an earlier output has it
        self._large: dict[tuple[int, int, int], list[FileData]] = {}
        self._cancel = cancel
        self._writer = Writer(handle, cancel)
        self._run: Run | None = None

    def __enter__(self) -> DataArea:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._writer.close(drop=kind is not None)

    def add(self, size: int, blocks: Iterable[Block]) -> FileData:
        """Take a file of `size` bytes in, given as blocks of `block_size`."""
        self._cancel.check()
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
        self._cancel.check()
        if old.size == 0:
            return FileData(0)
        if old.fragment >= 0:
            return self._pack(old.size, old.key, _Piece(old.size, None, earlier, old.fragment, old.offset))
        data = FileData(old.size)
        self._then(lambda _: self._copy_file(data, old, earlier))
        return data

    def end_layer(self) -> None:
        """Begin a new fragment, so that one layer's files never share one with another's."""
        self._flush()

    def finish(self) -> None:
        """Nothing more comes: `position` and all places are final, but what lies there may still be on its way."""
        self._flush()
        while self._jobs:
            self._take_one()
        self._flush_run()
        self._writer.finish()

    def settle(self) -> None:
        """After `finish`: wait until everything is written and synced."""
        self._writer.wait()

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
                self._then(lambda _: self._copy_fragment(earlier, number))
                return
        content = b"".join([_content(piece) for piece in pieces])
        self._submit(lambda packed: self._append_fragment(packed, size), size, self._pack_blocks, [content], False)

    def _compress(self, data: FileData, batch: list[Block], held: int) -> None:
        self._submit(lambda packed: self._append(data, packed), held, self._pack_blocks, batch, True)

    def _pack_blocks(self, blocks: list[Block], holes: bool) -> Packed:
        """In a thread: compress each block, or keep it as it is where that is no smaller."""
        sizes: list[int] = []
        sums: list[int] = []
        stored: list[Block] = []
        for block, packed in zip(blocks, self._compressor.pack(blocks), strict=True):
            if holes and len(packed) <= max(96, len(block) >> 8) and _is_zero(block):
                sizes.append(0)
                sums.append(0)
                continue
            smaller = len(packed) < len(block)
            kept = packed if smaller else block
            sizes.append(len(kept) if smaller else len(kept) | RAW)
            sums.append(isal_zlib.crc32(kept))
            stored.append(kept)
        return sizes, sums, stored

    def _submit(self, done: Callable[[Packed], None], size: int, work: Callable[..., Packed], *words: object) -> None:
        self._cancel.check()
        while self._pending > PENDING_SIZE:
            self._take_one()
        self._pending += size
        self._jobs.append((done, self._pool.submit(work, *words), size))
        self._take_ready()

    def _then(self, done: Callable[[Packed], None]) -> None:
        """Once all before has its place."""
        self._take_ready()
        if not self._jobs:
            done(([], [], []))
            return
        ready: Future[Packed] = Future()
        ready.set_result(([], [], []))
        self._jobs.append((done, ready, 0))

    def _take_ready(self) -> None:
        while self._jobs and self._jobs[0][1].done():
            self._take_one()

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

    def _copy_file(self, data: FileData, old: FileData, earlier: Earlier) -> None:
        data.sizes, data.sums, data.sparse = old.sizes, old.sums, old.sparse
        place = (earlier.handle, old.start, old.size)
        if (known := self._copied.get(place)) is not None:
            data.start = known.start
            return
        self._copied[place] = data
        data.start = self.position
        at = old.start
        for word, total in zip(old.sizes, old.sums, strict=True):
            self._copy(earlier.handle, at, word & (RAW - 1), total)
            at += word & (RAW - 1)
        self._finish(data)

    def _copy_fragment(self, earlier: Earlier, number: int) -> None:
        old = earlier.fragments[number]
        self.fragments.append(Fragment(self.position, old.word, old.sum, old.size))
        self._copy(earlier.handle, old.start, old.word & (RAW - 1), old.sum)

    def _copy(self, handle: int, start: int, size: int, total: int) -> None:
        """Blocks of an earlier output that follow one another go to the writer together."""
        if size == 0:
            return
        if self._run is None or self._run.size >= COPY_SIZE or not self._run.goes_on(handle, start, self.position):
            self._flush_run()
            self._run = Run(handle, start, self.position)
        self._run.add(size, total)
        self.position += size

    def _flush_run(self) -> None:
        if self._run is not None:
            self._writer.copy(self._run)
            self._run = None

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
        self._flush_run()
        self._writer.wait()
        for at in range(0, size, JOB_SIZE):
            count = min(JOB_SIZE, size - at)
            if os.pread(self._handle, count, one + at) != os.pread(self._handle, count, other + at):
                return False
        return True

    def _write(self, stored: Sequence[Block]) -> None:
        self._flush_run()
        self._writer.write(stored, self.position)
        self.position += sum(map(len, stored))


def _give_way() -> None:
    """Compressors have the lower priority, so that what feeds them stays ahead of them."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 2)


def _is_zero(block: Block) -> bool:
    return bytes(block).count(0) == len(block)


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

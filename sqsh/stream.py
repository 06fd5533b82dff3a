"""A layer as a stream of its tar's bytes: read, checked against its digest and decompressed in a thread of its own."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Protocol, cast

import zstandard
from isal import igzip_lib

from sqsh.cancel import Cancel
from sqsh.errors import BadImage
from sqsh.manifest import Blob

READ_SIZE = 1 << 20
CHUNK_SIZE = 1 << 20
CHUNKS_AHEAD = 16  # times CHUNK_SIZE: what a layer's stream may hold in memory
GZIP_MAGIC = b"\x1f\x8b"
GZIP_ERRORS = cast(tuple[type[Exception], ...], (igzip_lib.IsalError, EOFError))  # its stub calls it an instance
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a first byte of 0x50 to 0x5f
ZSTD_MAX_WINDOW = 128 << 20


@dataclass(frozen=True)
class Limits:
    """What an image may unpack to: guards against streams that are small and unpack to no end."""

    bytes: int = 1 << 40
    ratio: int = 400  # unpacked to packed, once `ratio_from` bytes are unpacked
    ratio_from: int = 4 << 30
    entries: int = 4_000_000


class LayerStream:
    """Chunks of a layer's tar. Reading to the end proves the digest; `close` ends the thread wherever it is."""

    def __init__(self, blob: Blob, limits: Limits, progress: Callable[[int], None], cancel: Cancel) -> None:
        self._blob = blob
        self._limits = limits
        self._progress = progress
        self._cancel = cancel
        self._chunks: queue.Queue[bytes | BaseException | None] = queue.Queue(CHUNKS_AHEAD)
        self._stopped = threading.Event()
        self.proves_its_end = True  # known once there is a chunk: a cut stream is told from a whole one
        self._thread = threading.Thread(target=self._work, name="layer", daemon=True)
        self._thread.start()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def chunk(self) -> bytes:
        """The next bytes; none at the end."""
        item = self._next()
        if isinstance(item, bytes):
            return item
        self._chunks.put(item)  # the end stays the end
        if item is not None:
            raise item
        return b""

    def _next(self) -> bytes | BaseException | None:
        while True:
            self._cancel.check()
            try:
                return self._chunks.get(timeout=0.2)
            except queue.Empty:
                continue

    def close(self) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._chunks.get(timeout=0.02)
            except queue.Empty:
                continue
        self._thread.join()

    def _work(self) -> None:
        end: BaseException | None = None
        try:
            packed = _Checked(self._blob, self._stopped, self._progress)
            try:
                self._pass_on(packed)
            finally:
                packed.close()
        except BaseException as error:
            end = error
        while not self._stopped.is_set():
            try:
                self._chunks.put(end, timeout=0.05)
                return
            except queue.Full:
                continue

    def _pass_on(self, packed: _Checked) -> None:
        total = 0
        head = packed.read()
        self.proves_its_end = not _is_zstd(head)
        for chunk in unpacked(packed, head, self._blob.digest):
            total += len(chunk)
            self._refuse_bomb(total, packed.count)
            self._chunks.put(chunk)
            if self._stopped.is_set():
                return
        packed.check()

    def _refuse_bomb(self, total: int, count: int) -> None:
        if total > self._limits.bytes:
            raise BadImage(
                f"the layer {self._blob.digest} unpacks to more than {self._limits.bytes} bytes", "--max-size"
            )
        if total > self._limits.ratio_from and total > self._limits.ratio * count:
            raise BadImage(
                f"the layer {self._blob.digest} unpacks to more than {self._limits.ratio} times its size",
                "this is what a decompression bomb does; --max-ratio allows more",
            )


class _Checked:
    """The packed bytes, counted and hashed as they pass."""

    def __init__(self, blob: Blob, stopped: threading.Event, progress: Callable[[int], None]) -> None:
        self._blob = blob
        self._stopped = stopped
        self._progress = progress
        self._source = blob.open(stopped)
        self._hash = hashlib.sha256()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="digest")
        self._hashed: Future[None] | None = None
        self.count = 0

    def read(self, size: int = READ_SIZE) -> bytes:
        if self._stopped.is_set():
            return b""
        data = self._source.read(size)
        self.count += len(data)
        if self.count > self._blob.size >= 0:
            raise BadImage(f"{self._blob.digest} is longer than the {self._blob.size} bytes that the manifest states")
        if self._hashed is not None:
            self._hashed.result()
        self._hashed = self._hashing.submit(self._hash.update, data)
        self._progress(len(data))
        return data

    def check(self) -> None:
        while self.read():
            pass
        if self._stopped.is_set():
            return
        if 0 <= self._blob.size != self.count:
            raise BadImage(f"{self._blob.digest} ends after {self.count} of {self._blob.size} bytes")
        if self._hashed is not None:
            self._hashed.result()
        if f"sha256:{self._hash.hexdigest()}" != self._blob.digest:
            raise BadImage(f"{self._blob.digest} has other content than its digest says", "fetch or build it again")

    def close(self) -> None:
        self._hashing.shutdown()
        self._source.close()


class _Reader(Protocol):
    def read(self, size: int = READ_SIZE) -> bytes: ...


def unpacked(packed: _Reader, head: bytes, name: str) -> Iterator[bytes]:
    """The tar's bytes in chunks of at most CHUNK_SIZE, whatever the compression (gzip, zstd, none) of what follows
    `head`."""
    if head.startswith(GZIP_MAGIC):
        yield from _gunzip(packed, head, name)
    elif _is_zstd(head):
        yield from _unzstd(packed, head, name)
    else:
        while head:
            yield head
            head = packed.read()


def _is_zstd(head: bytes) -> bool:
    return head.startswith(ZSTD_MAGIC) or (head[1:4] == ZSTD_SKIPPABLE and 0x50 <= head[0] <= 0x5F)


def _gunzip(packed: _Reader, data: bytes, name: str) -> Iterator[bytes]:
    """Members of a gzip file one after the other."""
    while data:
        member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        while not member.eof:
            try:
                chunk = member.decompress(data, CHUNK_SIZE)
            except GZIP_ERRORS as error:
                raise BadImage(f"the layer {name} is no valid gzip ({error})") from None
            if chunk:
                yield chunk
            data = b""
            if member.needs_input and not member.eof and not (data := packed.read()):
                raise BadImage(f"the layer {name} ends in the middle of its gzip stream")
        data = member.unused_data or packed.read()


def _unzstd(packed: _Reader, head: bytes, name: str) -> Iterator[bytes]:
    """Frames one after the other; the reader's output is bounded whatever the input claims.

    It does not tell a stream that ends within a frame from a whole one: the tar's end marker does (see tar.py).
    """
    reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW).stream_reader(
        cast(IO[bytes], _Joined(packed, head)), read_size=READ_SIZE, read_across_frames=True, closefd=False
    )
    while True:
        try:
            chunk = reader.read(CHUNK_SIZE)
        except zstandard.ZstdError as error:
            raise BadImage(f"the layer {name} is no valid zstd ({error})") from None
        if not chunk:
            return
        yield chunk


class _Joined:
    """What was read ahead, then the rest: a file for zstd's reader."""

    def __init__(self, packed: _Reader, head: bytes) -> None:
        self._packed = packed
        self._head = head

    def read(self, size: int = READ_SIZE) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        return self._packed.read(size)

"""A layer as a stream of its tar's bytes: read, checked against its digest and decompressed in a thread of its own."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from sqsh.cancel import Cancel
from sqsh.errors import BadImage
from sqsh.manifest import Blob
from sqsh.unpack import READ_SIZE, unpacked

CHUNKS_AHEAD = 16  # times CHUNK_SIZE: what a layer's stream may hold in memory


@dataclass(frozen=True)
class Limits:
    """What an image may unpack to: guards against streams that are small and unpack to no end."""

    bytes: int = 1 << 40
    ratio: int = 400  # unpacked to packed, once `ratio_from` bytes are unpacked
    ratio_from: int = 4 << 30
    entries: int = 4_000_000

    def refuse_bomb(self, unpacked: int, packed: int, name: str) -> None:
        if unpacked > self.bytes:
            raise BadImage(f"{name} unpacks to more than {self.bytes} bytes", "--max-size allows more")
        if unpacked > self.ratio_from and unpacked > self.ratio * packed:
            raise BadImage(
                f"{name} unpacks to more than {self.ratio} times its size",
                "this is what a decompression bomb does; --max-ratio allows more",
            )


class LayerStream:
    """Chunks of a layer's tar. Reading to the end proves the digest; `close` ends the thread wherever it is."""

    def __init__(self, blob: Blob, limits: Limits, progress: Callable[[int], None], cancel: Cancel) -> None:
        self._blob = blob
        self._limits = limits
        self._progress = progress
        self._cancel = cancel
        self._chunks: queue.Queue[bytes | BaseException | None] = queue.Queue(CHUNKS_AHEAD)
        self._stopped = threading.Event()
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
        for chunk in unpacked(packed, packed.read(), f"the layer {self._blob.digest}"):
            total += len(chunk)
            self._limits.refuse_bomb(total, packed.count, f"the layer {self._blob.digest}")
            if self._blob.of_tar:
                packed.hash(chunk)
            self._chunks.put(chunk)
            if self._stopped.is_set():
                return
        packed.check()


class _Checked:
    """The packed bytes, counted as they pass, and hashed unless the digest is that of the unpacked ones."""

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
        if not self._blob.of_tar:
            self.hash(data)
        self._progress(len(data))
        return data

    def hash(self, data: bytes) -> None:
        if self._hashed is not None:
            self._hashed.result()
        self._hashed = self._hashing.submit(self._hash.update, data)

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

"""What writes the data area: a thread that keeps the order, and a process for what is copied from earlier outputs."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from isal import isal_zlib

from sqsh.cancel import Cancel
from sqsh.compress import Block
from sqsh.copier import Copier

UNWRITTEN_SIZE = 32 << 20  # bytes waiting for the disk
SYNC_SIZE = 128 << 20  # write back in the background after so many bytes, so that the last sync has little to do


class Run:
    """Blocks in a row in an earlier output, on their way to `position`, and the check sum of all their bytes."""

    __slots__ = ("handle", "position", "size", "start", "total")

    def __init__(self, handle: int, start: int, position: int) -> None:
        self.handle = handle
        self.start = start
        self.position = position
        self.size = 0
        self.total = 0

    def goes_on(self, handle: int, start: int, position: int) -> bool:
        return (handle, start, position) == (self.handle, self.start + self.size, self.position + self.size)

    def add(self, size: int, total: int) -> None:
        self.total = isal_zlib.crc32_combine(self.total, total, size)
        self.size += size


class Writer:
    """Writes in a thread of its own, in the order given, and has the kernel write back while the rest is made."""

    def __init__(self, handle: int, cancel: Cancel) -> None:
        self._handle = handle
        self._cancel = cancel
        self._dropped = False
        self._todo: queue.SimpleQueue[tuple[Callable[[], int], int] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._left = 0  # things to write
        self._held = 0  # bytes in memory for them
        self._unsynced = 0
        self._copier: Copier | None = None
        self._error: BaseException | None = None
        self._sync = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._syncing: Future[None] | None = None
        self._thread = threading.Thread(target=self._work, name="write", daemon=True)
        self._thread.start()

    def write(self, parts: Sequence[Block], position: int) -> None:
        self._add(lambda: write_all(self._handle, parts, position), sum(map(len, parts)))

    def copy(self, run: Run) -> None:
        self._add(lambda: self._copy(run), 0)

    def finish(self) -> None:
        self._add(self._last_sync, 0)

    def wait(self) -> None:
        """Until all is written, as far as the kernel's cache. Raises what went wrong: OSError, Changed."""
        self._add(self._finish_copies, 0)
        with self._changed:
            self._until(lambda: self._left == 0)

    def close(self, drop: bool) -> None:
        """End the thread, at once or when all is written."""
        self._dropped = drop
        if drop and self._copier is not None:
            self._copier.kill()  # the thread may be waiting for it
        self._todo.put(None)
        self._thread.join()
        if self._copier is not None:
            self._copier.close()
        self._sync.shutdown(wait=True)

    def _add(self, work: Callable[[], int], held: int) -> None:
        with self._changed:
            self._until(lambda: self._held < UNWRITTEN_SIZE)
            self._left += 1
            self._held += held
        self._todo.put((work, held))

    def _until(self, condition: Callable[[], bool]) -> None:
        while not self._changed.wait_for(lambda: condition() or self._error is not None, timeout=0.2):
            self._cancel.check()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            work, held = item
            error = None
            if self._error is None and not self._dropped:
                try:
                    self._write_back(work())
                except BaseException as found:
                    error = found
            with self._changed:
                self._left -= 1
                self._held -= held
                self._error = self._error or error
                self._changed.notify_all()

    def _write_back(self, size: int) -> None:
        self._unsynced += size
        if self._unsynced < SYNC_SIZE or (self._syncing is not None and not self._syncing.done()):
            return
        if self._syncing is not None:
            self._syncing.result()  # the kernel says once only what went wrong
        self._unsynced = 0
        self._syncing = self._sync.submit(os.fdatasync, self._handle)

    def _copy(self, run: Run) -> int:
        if self._copier is None:
            self._copier = Copier(self._handle)
        self._copier.copy(run.handle, run.start, run.position, run.size, run.total)
        return run.size

    def _finish_copies(self) -> int:
        if self._copier is not None:
            self._copier.finish()
        return 0

    def _last_sync(self) -> int:
        self._finish_copies()
        if self._syncing is not None:
            self._syncing.result()
        os.fdatasync(self._handle)
        self._unsynced = 0
        return 0


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

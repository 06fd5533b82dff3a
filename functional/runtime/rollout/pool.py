"""The event loop and the connections of a run: one of each, kept from its first request to its last."""

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

Result = TypeVar("Result")

SPARE_FILES = 256
"""Files that the rest of the process may open while every connection is in use."""


class HttpPool:
    """An event loop in a thread of its own, and a pool of connections that its coroutines share.

    The pool has no limit but the number of files that the process may have open, which it raises as far as it may:
    requests beyond that wait for a connection.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._http = self.run(_open_session(spare_connections()))

    @property
    def http(self) -> aiohttp.ClientSession:
        """For coroutines that `run` runs."""
        return self._http

    def processor_s(self) -> float:
        """Processor time, in seconds, that the loop has used so far."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run it to its end, from any other thread. An exception here, such as a signal's, cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is under way, and close every connection."""
        if self._loop.is_closed():
            return
        self.run(_close(self._http))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "HttpPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def spare_connections() -> int:
    """How many connections this process may have open beside what it has: 0 when there is no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20  # the kernel's own limit of a process, unless it was raised
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return max(soft - len(list(Path("/proc/self/fd").iterdir())) - SPARE_FILES, 1)


async def _open_session(connections: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,  # answers are asked for as they are, so that their size on the wire is their size
        headers={"accept-encoding": "identity", "content-type": "application/json"},
    )


async def _close(http: aiohttp.ClientSession) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await http.close()

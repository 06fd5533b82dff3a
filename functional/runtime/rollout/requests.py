"""Every request sent, and the proof that Dynamo served exactly those: a join with the workers' own logs, not counters.

A worker logs `request received request_id=<uuid>` with `endpoint="generate"` for each request (Dynamo 1.3.0.post1).
"""

import asyncio
import re
import threading
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

from functional.runtime.errors import RunError
from functional.runtime.jsonlines import JsonLines, read_json_lines

WRITE_INTERVAL_S = 0.1

Outcome = Literal["accepted", "rejected", "retried", "aborted"]

_RECEIVED = re.compile(r'request received request_id=([0-9a-f-]{36})\b.*\bendpoint="generate"')
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Attempt:
    """One request as it was sent. `number` counts from 1; a retried one is followed by another with the same `sample`.

    sample: the rollout it was for, the same over all attempts; purpose: rollout or probe. Times: seconds since 1970.
    """

    request_id: str
    sample: str
    purpose: str
    number: int
    outcome: Outcome
    reason: str | None
    sent_at: float
    ended_at: float


class RequestJournal:
    """Appends attempts to a JSON Lines file, in a thread of its own, so that no event loop waits for a disk.

    Attempts added before `written` was called survive the death of this process once its future is done, and any other
    WRITE_INTERVAL_S later. To wake the thread for each would cost an event loop as much as its request.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._attempts: deque[Attempt] = deque()
        self._marks: SimpleQueue[Future[None] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="request journal", daemon=True)
        self._thread.start()

    def add(self, attempt: Attempt) -> None:
        self._attempts.append(attempt)

    def written(self) -> "Future[None]":
        """Done once all that was added is in the file; holds a RunError when that cannot be."""
        mark: Future[None] = Future()
        self._marks.put(mark)
        return mark

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._marks.put(None)
        self._thread.join()
        self._lines.close()

    def _work(self) -> None:
        closing = False
        while not closing:
            mark = None
            with suppress(Empty):
                mark = self._marks.get(timeout=WRITE_INTERVAL_S)
                closing = mark is None
            self._write()
            if mark is None or not mark.set_running_or_notify_cancel():
                continue
            if self._failure is None:
                mark.set_result(None)
            else:
                mark.set_exception(RunError(f"requests cannot be recorded any more: {self._failure}"))

    def _write(self) -> None:
        try:
            if self._attempts:
                self._lines.append_records([self._attempts.popleft() for _ in range(len(self._attempts))])
        except Exception as error:  # whatever it is, those who wait must hear of it
            self._failure = self._failure or error


class SharedWrites:
    """A journal's `written` for many waiters of one event loop: those who come while it writes share the next one."""

    def __init__(self, journal: RequestJournal) -> None:
        self._journal = journal
        self._waiting: list[asyncio.Future[None]] = []
        self._writing: asyncio.Task[None] | None = None

    async def written(self) -> None:
        """Returns once all that was added before is in the file. Raises RunError when that cannot be."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        await waiter

    async def _write(self) -> None:
        """As long as somebody waits. Cancelled, as when its loop is closed, it leaves nobody waiting."""
        waiting: list[asyncio.Future[None]] = []
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                failure: BaseException | None = None
                try:
                    await asyncio.wrap_future(self._journal.written())
                except RunError as error:
                    failure = error
                for waiter in waiting:
                    if waiter.done():  # cancelled
                        continue
                    if failure is None:
                        waiter.set_result(None)
                    else:
                        waiter.set_exception(failure)
        finally:
            self._writing = None
            for waiter in (*waiting, *self._waiting):
                waiter.cancel()
            self._waiting = []


def read_attempts(path: Path) -> list[Attempt]:
    """All attempts of a journal's file, as far as its lines are whole."""
    return [Attempt(**row) for row in read_json_lines(path)]


@dataclass(frozen=True)
class Join:
    """Requests sent against requests logged. The last four lists hold request IDs and are empty in a proven run."""

    sent: dict[str, int]
    logged: int
    unknown: list[str]
    unserved: list[str]
    served_twice: list[str]
    answered_twice: list[str]

    @property
    def is_one_to_one(self) -> bool:
        return not (self.unknown or self.unserved or self.served_twice or self.answered_twice)


def join(attempts: Iterable[Attempt], worker_logs: Iterable[Path]) -> Join:
    """Match attempts with the generate requests in the workers' logs.

    Every answered attempt must be logged once, and every logged request must be an attempt; a retried or aborted one
    may have been lost on its way. No sample may be answered twice.
    """
    sent = {attempt.request_id: attempt for attempt in attempts}
    logged = Counter(request for log in worker_logs for request in received_requests(log))
    answered = [a for a in sent.values() if a.outcome in ("accepted", "rejected")]
    samples = Counter(a.sample for a in answered)
    return Join(
        sent=dict(Counter(a.outcome for a in sent.values())),
        logged=sum(logged.values()),
        unknown=sorted(logged.keys() - sent.keys()),
        unserved=sorted(a.request_id for a in answered if a.request_id not in logged),
        served_twice=sorted(request for request, count in logged.items() if count > 1),
        answered_twice=sorted(sample for sample, count in samples.items() if count > 1),
    )


def received_requests(log: Path) -> list[str]:
    """IDs of the generate requests a worker logged, in order."""
    text = _COLOURS.sub("", log.read_text(encoding="utf-8", errors="replace"))
    return [match[1] for line in text.splitlines() if (match := _RECEIVED.search(line))]

"""A client process that `spread` starts: requests come through a pipe, one by one, and what became of each goes back.

    python -m functional.runtime.rollout.helper FD

FD is this end of the pipe, on which `Served` and the path of the journal come first.
"""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from functional.runtime.errors import RolloutError, RunError
from functional.runtime.rollout.client import RolloutClient
from functional.runtime.rollout.completion import Completion
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal, SharedWrites
from functional.runtime.rollout.spread import Answer, Asked, Order, Served, all_of


def serve(pipe: Connection) -> None:
    """A helper's life: requests, until the other side has no more, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side says when to end
    answers: SimpleQueue[Answer] = SimpleQueue()
    with contextlib.suppress(EOFError, OSError):
        served, journal_path = pipe.recv()
        _serve(pipe, served, journal_path, answers)


def _serve(pipe: Connection, served: Served, journal_path: Path, answers: "SimpleQueue[Answer]") -> None:
    with (
        contextlib.closing(RequestJournal(journal_path)) as journal,
        HttpPool() as pool,
    ):
        threading.Thread(target=_give_back, args=(pipe, pool, answers), daemon=True).start()
        # Past the gate and the limit, which are the other side's.
        desk = _Desk(replace(served, max_inflight=None).client(pool, AdmissionGate(), journal), journal, answers)
        while True:
            orders: list[Order] = pipe.recv()
            pool.run(desk.take([order for order in orders if order is not None]))
            if None in orders:
                return


def _give_back(pipe: Connection, pool: HttpPool, answers: "SimpleQueue[Answer]") -> None:
    with contextlib.suppress(OSError):  # the other side is gone
        while True:
            found = all_of(answers)
            pipe.send((pool.processor_s(), found))


class _Desk:
    """A helper's requests under way, on its loop."""

    def __init__(self, client: RolloutClient, journal: RequestJournal, answers: "SimpleQueue[Answer]") -> None:
        self._client = client
        self._writes = SharedWrites(journal)
        self._answers = answers
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def take(self, orders: Sequence[tuple[int, Asked | None]]) -> None:
        given_up = {number for number, asked in orders if asked is None}
        for number, asked in orders:
            if asked is not None and number in given_up:  # a task that is cancelled before its first step says nothing
                self._answers.put((number, RolloutError("given up while under way")))
            elif asked is not None:
                self._tasks[number] = asyncio.ensure_future(self._answer(number, asked))
            elif number in self._tasks:
                self._tasks[number].cancel()

    async def _answer(self, number: int, asked: Asked) -> None:
        """Once every attempt is in the journal's file."""
        found: Completion | RunError
        try:
            found = await self._client.send(*asked)
        except asyncio.CancelledError:
            found = RolloutError("given up while under way")
        except RunError as error:
            found = error
        except Exception as error:
            found = RolloutError(f"a client process failed: {type(error).__name__}: {error}")
        try:
            await self._writes.written()
        except asyncio.CancelledError:
            pass  # what was given up is answered, and not waited for any more
        except RunError as error:
            found = error
        del self._tasks[number]
        self._answers.put((number, found))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

"""More client processes, for a fleet that answers faster than one event loop takes the answers in.

A helper is a process with an event loop, connections and a journal of its own. It is given requests one by one, as they
pass the gate and the limit here, and gives back what became of each. It ends with the process that started it.
"""

import asyncio
import contextlib
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from functional.runtime.errors import RolloutError, RunError
from functional.runtime.rollout.client import Limits, RolloutClient
from functional.runtime.rollout.completion import Completion, Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal

Outcomes = list[Completion | RolloutError]
Prompts = Sequence[Sequence[int]]
Asked = tuple[Sequence[int], Sampling, int | None, str]
"""The arguments of `RolloutClient.send`."""
Order = tuple[int, Asked | None] | None
"""To a helper: a request under a number, or that it is given up; None: the end."""
Answer = tuple[int, Completion | RunError]

BUSY = 0.7
"""Of its time that a loop may be at work: beyond, requests wait for each other."""
WORTH_S = 1.0
"""A batch that takes less asks for no helper: to start one takes about as long."""
GRACE_S = 10.0
"""How much longer than a request's own deadline, or after it was given up, a helper may take to say what became of it:
one that does not counts as hung, and is ended."""


@dataclass(frozen=True)
class Served:
    """Where and what rollouts are asked of; `RolloutClient` says what the fields are."""

    url: str
    model: str
    limits: Limits
    timeout_s: float
    max_inflight: int | None = None

    def client(self, pool: HttpPool, gate: AdmissionGate, journal: RequestJournal | None) -> RolloutClient:
        return RolloutClient(pool, self.url, self.model, gate, self.limits, self.timeout_s, journal, self.max_inflight)


class SpreadClient(RolloutClient):
    """Completes batches of rollouts, in this process and in as many helpers as the batches before asked for."""

    def __init__(
        self,
        pool: HttpPool,
        gate: AdmissionGate,
        served: Served,
        journals: Path,
        journal: RequestJournal | None = None,
        processors: int | None = None,
    ) -> None:
        """journals: folder of the helpers' requests-N.jsonl; processors: of this machine, unless given."""
        super().__init__(
            pool, served.url, served.model, gate, served.limits, served.timeout_s, journal, served.max_inflight
        )
        self._served = served
        self._journals = journals
        self._processors = processors or os.cpu_count() or 1
        self._helpers: list[_Helper] = []
        self._places = itertools.count()

    @property
    def processes(self) -> int:
        return 1 + len(self._helpers)

    async def complete_each(self, prompts: Prompts, sampling: Sampling, given_up: asyncio.Event) -> Outcomes:
        """As RolloutClient.complete_each."""
        began, used = time.monotonic(), self._processor_s()
        outcomes = await super().complete_each(prompts, sampling, given_up)
        took = time.monotonic() - began
        if took >= WORTH_S:
            wanted = processes_wanted((self._processor_s() - used) / took, self._processors)
            while self.processes < wanted:
                self.add_helper()
        return outcomes

    async def send(
        self, prompt: Sequence[int], sampling: Sampling, instance_id: int | None, purpose: str
    ) -> Completion:
        """Each process in turn."""
        place = next(self._places) % self.processes
        if place == 0:
            return await super().send(prompt, sampling, instance_id, purpose)
        return await self._helpers[place - 1].send((prompt, sampling, instance_id, purpose))

    def _processor_s(self) -> float:
        return self.pool.processor_s() + sum(helper.processor_s for helper in self._helpers)

    def add_helper(self) -> None:
        """Start one more; it stays."""
        self._helpers.append(_Helper(self._served, self._journals / f"requests-{self.processes}.jsonl"))

    def close(self) -> None:
        """End the helpers."""
        for helper in self._helpers:
            helper.close()
        self._helpers = []


def processes_wanted(busy: float, processors: int) -> int:
    """How many client processes a load asks for that kept loops at work for `busy` times the time that it took.

    As many as keep each below BUSY, and no more than leave one processor to others.
    """
    return max(1, min(math.ceil(busy / BUSY), processors - 1))


Item = TypeVar("Item")


def all_of(queue: "SimpleQueue[Item]") -> list[Item]:
    """What is in it; waits while it is empty."""
    items = [queue.get()]
    with contextlib.suppress(Empty):
        while True:
            items.append(queue.get_nowait())
    return items


class _Helper:
    """One process, the pipe to it, and a thread for each of its directions: no event loop waits for a pipe.

    processor_s: what its loop had used at its last answer.
    """

    def __init__(self, served: Served, journal: Path) -> None:
        self._pipe, theirs = Pipe()
        # Not by multiprocessing, whose resource tracker would stay until this process ends.
        command = [sys.executable, "-m", "functional.runtime.rollout.helper", str(theirs.fileno())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=environment
        )
        theirs.close()
        self._pipe.send((served, journal))
        self.processor_s = 0.0
        self._patience_s = served.timeout_s + GRACE_S
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Completion | RunError]] = {}
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: str | None = None
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    async def send(self, asked: Asked) -> Completion:
        """As RolloutClient.send. Cancelled, it returns once the request is given up there."""
        self._loop = asyncio.get_running_loop()
        if self._end is not None:
            raise RolloutError(self._end)
        number, answer = next(self._numbers), self._loop.create_future()
        self._answers[number] = answer
        self._orders.put((number, asked))
        late = self._loop.call_later(self._patience_s, self._hangs, answer, self._patience_s)
        try:
            found: Completion | RunError = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._orders.put((number, None))
            late.cancel()
            late = self._loop.call_later(GRACE_S, self._hangs, answer, GRACE_S)
            await answer
            raise
        finally:
            late.cancel()
            del self._answers[number]
        if isinstance(found, RunError):
            raise found
        return found

    def _hangs(self, answer: "asyncio.Future[Completion | RunError]", patience_s: float) -> None:
        if not answer.done():
            self._process.kill()
            self._over(f"a client process was ended: it did not answer in {patience_s:g} s")

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it is gone, as `_read` finds
            orders: list[Order] = []
            while None not in orders:
                orders = all_of(self._orders)
                self._pipe.send(orders)

    def _read(self) -> None:
        try:
            while True:
                self.processor_s, answers = self._pipe.recv()
                assert self._loop is not None  # it was asked
                self._loop.call_soon_threadsafe(self._deliver, answers)
        except (EOFError, OSError) as error:
            reason = f"a client process ended: {type(error).__name__}"
            self._end = self._end or reason
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    self._loop.call_soon_threadsafe(self._over, reason)

    def _deliver(self, answers: list[Answer]) -> None:
        for number, found in answers:
            answer = self._answers.get(number)
            if answer is not None and not answer.done():
                answer.set_result(found)

    def _over(self, reason: str) -> None:
        """No answer comes any more."""
        self._end = self._end or reason
        self._deliver([(number, RolloutError(self._end)) for number in self._answers])

    def close(self) -> None:
        self._orders.put(None)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._orders.put(None)  # for a thread that found the process gone before
        for thread in self._threads:
            thread.join()
        self._pipe.close()

"""More client processes, for a fleet that answers faster than one event loop takes the answers in.

A helper is a process with an event loop, connections and a journal of its own. It is given a part of a batch, and gives
back what became of each request. It ends with the process that started it.
"""

import asyncio
import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from functional.runtime.errors import RolloutError
from functional.runtime.rollout.client import Limits, RolloutClient
from functional.runtime.rollout.completion import Completion, Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal

Outcomes = list[Completion | RolloutError]
Prompts = Sequence[Sequence[int]]

BUSY = 0.7
"""Of its time that a loop may be at work: beyond, requests wait for each other."""
WORTH_S = 1.0
"""A batch that takes less asks for no helper: to start one takes about as long."""
POLL_S = 0.1


@dataclass(frozen=True)
class Served:
    """Where and what rollouts are asked of; `RolloutClient` says what the fields are."""

    url: str
    model: str
    limits: Limits
    timeout_s: float
    max_inflight: int | None = None

    def client(
        self, pool: HttpPool, gate: AdmissionGate, journal: RequestJournal | None, processes: int = 1
    ) -> RolloutClient:
        """One of as many processes' clients, which share what may be under way at a time."""
        cap = None if self.max_inflight is None else max(1, self.max_inflight // processes)
        return RolloutClient(pool, self.url, self.model, gate, self.limits, self.timeout_s, journal, cap)


class SpreadClient:
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
        self.pool = pool
        self._gate = gate
        self._served = served
        self._journals = journals
        self._journal = journal
        self._processors = processors or os.cpu_count() or 1
        self._helpers: list[_Helper] = []
        self._alone = served.client(pool, gate, journal)

    @property
    def processes(self) -> int:
        return 1 + len(self._helpers)

    async def complete_each(self, prompts: Prompts, sampling: Sampling, given_up: asyncio.Event) -> Outcomes:
        """As RolloutClient.complete_each."""
        began, used = time.monotonic(), self.pool.processor_s()
        others = 0.0
        if self._helpers:
            outcomes, others = await self._spread(prompts, sampling, given_up)
        else:
            outcomes = await self._alone.complete_each(prompts, sampling, given_up)
        took = time.monotonic() - began
        if took >= WORTH_S:
            wanted = processes_wanted((self.pool.processor_s() - used + others) / took, self._processors)
            while self.processes < wanted:
                self.add_helper()
        return outcomes

    async def _spread(self, prompts: Prompts, sampling: Sampling, given_up: asyncio.Event) -> tuple[Outcomes, float]:
        """Every nth prompt to each process. Returns the helpers' processor seconds too."""
        count = self.processes
        own = self._served.client(self.pool, self._gate, self._journal, count)
        parts = [prompts[first::count] for first in range(count)]
        elsewhere = asyncio.gather(
            *(
                self._through_gate(helper, part, sampling, given_up)
                for helper, part in zip(self._helpers, parts[1:], strict=True)
            )
        )
        mine, theirs = await asyncio.gather(own.complete_each(parts[0], sampling, given_up), elsewhere)
        outcomes: Outcomes = [RolloutError("not asked")] * len(prompts)
        for first, found in enumerate([mine, *(found for found, _ in theirs)]):
            outcomes[first::count] = found
        return outcomes, sum(seconds for _, seconds in theirs)

    async def _through_gate(
        self, helper: "_Helper", part: Prompts, sampling: Sampling, given_up: asyncio.Event
    ) -> tuple[Outcomes, float]:
        try:
            first = await unless(given_up, self._gate, len(part))
        except RolloutError as refused:
            return [refused] * len(part), 0.0
        try:
            found, seconds = await helper.complete_each(part, sampling, given_up, self.processes)
            if not await comes_before(given_up, self._gate.confirmed()):
                return [RolloutError("given up while under way")] * len(part), seconds
            return [_of_versions(one, first, self._gate.newest) for one in found], seconds
        finally:
            self._gate.leave(len(part))

    def add_helper(self) -> None:
        """Start one more; it stays."""
        self._helpers.append(_Helper(self._served, self._journals / f"requests-{self.processes}.jsonl"))

    def close(self) -> None:
        """End the helpers."""
        for helper in self._helpers:
            helper.close()
        self._helpers = []


async def unless(given_up: asyncio.Event, gate: AdmissionGate, count: int) -> int | None:
    """What `gate.admit(count)` gives. Raises RolloutError where all is given up before."""
    admitted, ended = asyncio.ensure_future(gate.admit(count)), asyncio.ensure_future(given_up.wait())
    try:
        await asyncio.wait({admitted, ended}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if not admitted.cancel() and not admitted.cancelled() and admitted.exception() is None:
            gate.leave(count)  # let in at the same moment
        raise
    finally:
        ended.cancel()
        admitted.cancel()
    if not admitted.done():
        raise RolloutError("given up while admission was shut")
    return admitted.result()


async def comes_before(given_up: asyncio.Event, awaited: Coroutine[Any, Any, None]) -> bool:
    """Whether what is awaited is there before all is given up."""
    tasks = [asyncio.ensure_future(awaited), asyncio.ensure_future(given_up.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


def _of_versions(found: Completion | RolloutError, first: int | None, last: int | None) -> Completion | RolloutError:
    """A helper's gate knows no version."""
    return found if isinstance(found, RolloutError) else replace(found, policy_version=first, last_version=last)


def processes_wanted(busy: float, processors: int) -> int:
    """How many client processes a load asks for that kept loops at work for `busy` times the time that it took.

    As many as keep each below BUSY, and no more than leave one processor to others.
    """
    return max(1, min(math.ceil(busy / BUSY), processors - 1))


class _Helper:
    """One process, and the pipe to it. One batch at a time."""

    def __init__(self, served: Served, journal: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, served, journal), daemon=True, name="rollouts")
        self._process.start()
        theirs.close()

    async def complete_each(
        self, prompts: Prompts, sampling: Sampling, given_up: asyncio.Event, processes: int
    ) -> tuple[Outcomes, float]:
        """What became of each, and the processor seconds that it took there. Given up or cancelled, it is told so."""
        loop = asyncio.get_running_loop()
        giving_up = asyncio.ensure_future(given_up.wait())
        try:
            await loop.run_in_executor(None, self._pipe.send, (prompts, sampling, processes))
            answer = asyncio.ensure_future(loop.run_in_executor(None, self._pipe.recv))
            try:
                await asyncio.wait({answer, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not answer.done():
                    self._pipe.send(None)
                    await asyncio.wait({answer})
            found: tuple[Outcomes, float] = answer.result()
        except (EOFError, OSError) as error:
            return [RolloutError(f"a client process ended: {type(error).__name__}")] * len(prompts), 0.0
        finally:
            giving_up.cancel()
        return found

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, served: Served, journal_path: Path) -> None:
    """A helper's life: batches, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side says when to end
    with (
        contextlib.suppress(EOFError, OSError),
        contextlib.closing(RequestJournal(journal_path)) as journal,
        HttpPool() as pool,
    ):
        while True:
            batch = pipe.recv()
            if batch is not None:  # None: the batch before had ended when it was given up
                prompts, sampling, processes = batch
                client = served.client(pool, AdmissionGate(), journal, processes)
                pipe.send(pool.run(_complete_each(client, pipe, prompts, sampling)))


async def _complete_each(
    client: RolloutClient, pipe: Connection, prompts: Prompts, sampling: Sampling
) -> tuple[Outcomes, float]:
    used = client.pool.processor_s()
    given_up = asyncio.Event()
    watch = asyncio.ensure_future(_watch(pipe, given_up))
    try:
        outcomes = await client.complete_each(prompts, sampling, given_up)
    finally:
        watch.cancel()
    return outcomes, client.pool.processor_s() - used


async def _watch(pipe: Connection, given_up: asyncio.Event) -> None:
    """Set `given_up` once the other side has spoken or is gone; what it said stays in the pipe."""
    while not pipe.poll():
        await asyncio.sleep(POLL_S)
    given_up.set()

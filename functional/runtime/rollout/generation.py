"""Generation of a batch while the fleet is watched: what is lost with a worker, or by an update that failed beside
it, is generated again by a fleet that was made whole, until nothing is lost."""

import asyncio
import itertools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from functional.runtime.errors import RolloutError
from functional.runtime.fleet.fleet import Fleet
from functional.runtime.rollout.completion import Sampling
from functional.runtime.rollout.pool import HttpPool

WATCH_INTERVAL_S = 0.5
DYING_S = 3.0
"""How long a worker whose requests failed may take until its processes have ended."""


class Found(Protocol):
    """A dataclass: what came of a prompt, and at which attempt."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def attempt(self) -> int: ...


AskedType = TypeVar("AskedType", contravariant=True)
FoundType = TypeVar("FoundType", bound=Found)
FoundOut = TypeVar("FoundOut", bound=Found, covariant=True)


class Completer(Protocol[AskedType, FoundOut]):
    """A client of batches, such as SpreadClient."""

    @property
    def pool(self) -> HttpPool: ...

    async def complete_each(
        self, prompts: Sequence[AskedType], sampling: Sampling, given_up: asyncio.Event
    ) -> Sequence[FoundOut | RolloutError]: ...


def generate(
    client: Completer[AskedType, FoundType],
    fleet: Fleet,
    prompts: Sequence[AskedType],
    sampling: Sampling,
    *,
    find_lost: Callable[[], Mapping[int, str]],
    make_whole: Callable[[], None] | None,
    on_lost: Callable[[int, RolloutError], None] = lambda index, error: None,
    addressed: Callable[[Sampling], Sampling] = lambda sampling: sampling,
    state: Callable[[], Hashable] = lambda: None,
    is_given_up: Callable[[Hashable], bool] = lambda state: False,
) -> list[FoundType]:
    """A completion for each prompt, in order; `attempt` is one higher for each time that it was generated again.

    find_lost asks every worker, and gives slot → why for those that count as lost; make_whole replaces them, at the
    version that the fleet has (a refit does both, and lies above this room), and is None while there is no such
    version; on_lost hears the place in the batch of each lost sample, and why, before anything is done about it;
    addressed adds the workers that requests must name, as they are when it is asked.

    Where updates go on beside this, `state` is another after each that gave up what was under way or replaced a worker;
    is_given_up is asked at each look at the fleet, with the state in which the requests were sent, whether they are to
    be lost; what it raises ends the batch.

    Each further loss needs a cause of its own: an update that failed since, or another lost worker. A sample may be
    what ends its worker, so once one was lost, the next may be lost only after another sample was answered.

    Raises RolloutError for requests that failed for neither cause, and for workers that are lost one after the other
    with no answer in between; ProcessDiedError when a process dies that nothing replaces; and what `make_whole` raises.
    """
    done: dict[int, FoundType] = {}
    left = list(range(len(prompts)))
    answered: int | None = None  # when a worker was lost last
    for again in itertools.count():
        began = state()
        asked = [prompts[index] for index in left]
        outcomes = complete_under_watch(client, fleet, asked, addressed(sampling), partial(is_given_up, began))
        lost: dict[int, RolloutError] = {}
        for index, found in zip(left, outcomes, strict=True):
            if isinstance(found, RolloutError):
                lost[index] = found
                on_lost(index, found)
            else:
                done[index] = replace(found, attempt=found.attempt + again)
        if not lost:
            break
        first = next(iter(lost.values()))
        if make_whole is None:
            raise first
        if state() == began:
            is_lost = is_worker_lost(fleet, find_lost)
            if state() == began:  # an update may have come to its end meanwhile
                if not is_lost:
                    raise first
                if answered == len(done):
                    raise RolloutError(
                        f"workers were lost one after the other while {len(lost)} samples were generated, with none "
                        f"answered in between ({first}): the workers' logs say what ends them"
                    ) from first
                answered = len(done)
        make_whole()
        left = list(lost)
    return [done[index] for index in range(len(prompts))]


def complete_under_watch(
    client: Completer[AskedType, FoundType],
    fleet: Fleet,
    prompts: Sequence[AskedType],
    sampling: Sampling,
    is_given_up: Callable[[], bool] = lambda: False,
) -> list[FoundType | RolloutError]:
    """One outcome a prompt; once every worker is lost, or `is_given_up` says so, what is under way is given up.

    Raises ProcessDiedError when a process dies that nothing replaces.
    """

    async def watch() -> list[FoundType | RolloutError]:
        given_up = asyncio.Event()
        rollouts = asyncio.ensure_future(client.complete_each(prompts, sampling, given_up))
        try:
            while not rollouts.done():
                await asyncio.wait({rollouts}, timeout=WATCH_INTERVAL_S)
                if is_given_up():  # before the nodes are asked, which may take long
                    given_up.set()
                await asyncio.to_thread(fleet.check_control_plane)
                lost = await asyncio.to_thread(fleet.lost_workers)
                if len(lost) == len(fleet.workers):
                    given_up.set()
        except BaseException:
            rollouts.cancel()
            await asyncio.gather(rollouts, return_exceptions=True)
            raise
        return list(await rollouts)

    return client.pool.run(watch())


def is_worker_lost(fleet: Fleet, find_lost: Callable[[], Mapping[int, str]]) -> bool:
    """Whether a worker is lost, now that requests have failed. A dying process may take until `DYING_S` to be gone;
    if none is by then, `find_lost` decides."""
    deadline = time.monotonic() + DYING_S
    while not fleet.lost_workers():
        fleet.check_control_plane()
        if time.monotonic() > deadline:
            return bool(find_lost())
        time.sleep(0.2)
    return True

"""Generation of a batch while the fleet is watched: what is lost with a worker is generated again, once, by a fleet
made whole."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    is_given_up: Callable[[], bool] = lambda: False,
) -> list[FoundType]:
    """A completion for each prompt, in order; `attempt` is one higher for those that were generated again.

    find_lost asks every worker, and gives slot → why for those that count as lost; make_whole replaces them, at the
    version that the fleet has (a refit does both, and lies above this room), and is None while there is no such
    version; on_lost hears the place in the batch of each lost sample, and why, before anything is done about it;
    addressed adds the workers that requests must name, as they are when it is asked; is_given_up is asked at each look
    at the fleet whether what is under way is to be lost, and what it raises ends the batch.

    Raises RolloutError for requests that failed although no worker was lost, or a second time; ProcessDiedError when a
    process dies that nothing replaces; and what `make_whole` raises.
    """
    outcomes = complete_under_watch(client, fleet, prompts, addressed(sampling), is_given_up)
    lost = [(index, found) for index, found in enumerate(outcomes) if isinstance(found, RolloutError)]
    for index, error in lost:
        on_lost(index, error)
    if lost:
        _, first = lost[0]
        if not is_worker_lost(fleet, find_lost) or make_whole is None:
            raise first
        make_whole()
        left = [prompts[index] for index, _ in lost]
        again = complete_under_watch(client, fleet, left, addressed(sampling), is_given_up)
        for (index, _), found in zip(lost, again, strict=True):
            outcomes[index] = found if isinstance(found, RolloutError) else replace(found, attempt=found.attempt + 1)
    for found in outcomes:
        if isinstance(found, RolloutError):
            raise found
    return [found for found in outcomes if not isinstance(found, RolloutError)]


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
                await asyncio.to_thread(fleet.check_control_plane)
                lost = await asyncio.to_thread(fleet.lost_workers)
                if is_given_up() or len(lost) == len(fleet.workers):
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

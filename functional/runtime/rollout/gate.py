"""The admission gate, which keeps rollouts and policy updates apart, and the limit of what is under way."""

import asyncio
import threading
from contextlib import AbstractAsyncContextManager, nullcontext
from types import TracebackType

from functional.runtime.errors import AdmissionShutError, RolloutError


class AdmissionGate:
    """Lets rollouts in while open; `close_and_drain` shuts it and waits until none is under way.

    Thread-safe; a refit closes it from another thread than the one that generates.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._open = True
        self._inside = 0
        self._entered = 0

    @property
    def is_open(self) -> bool:
        return self._open

    def idle_since(self) -> int | None:
        """None while a rollout is under way; else how many there have been: the same later, if none was since."""
        with self._condition:
            return None if self._inside else self._entered

    def enter(self) -> None:
        """Count one rollout in. Raises AdmissionShutError while the gate is shut."""
        with self._condition:
            if not self._open:
                raise AdmissionShutError("rollout refused: admission is shut (an update is under way or has failed)")
            self._inside += 1
            self._entered += 1

    def leave(self) -> None:
        with self._condition:
            self._inside -= 1
            self._condition.notify_all()

    def shut(self) -> None:
        """Let nobody in any more; whoever is inside stays."""
        with self._condition:
            self._open = False

    def close_and_drain(self, timeout_s: float) -> None:
        """Shut the gate and wait for the rollouts inside. Raises RolloutError at the deadline; the gate stays shut."""
        with self._condition:
            self._open = False
            if not self._condition.wait_for(lambda: self._inside == 0, timeout_s):
                raise RolloutError(f"{self._inside} rollouts still under way {timeout_s:g} s after admission was shut")

    def reopen(self) -> None:
        with self._condition:
            self._open = True


class Admission:
    """What a rollout passes before it is sent: the limit of its client, then the gate."""

    def __init__(self, gate: AdmissionGate, max_inflight: int | None) -> None:
        """max_inflight: rollouts under way at a time, None for all of them."""
        self._gate = gate
        self._inflight: AbstractAsyncContextManager[object] = (
            nullcontext() if max_inflight is None else asyncio.Semaphore(max_inflight)
        )

    async def __aenter__(self) -> None:
        """Raises AdmissionShutError while the gate is shut."""
        await self._inflight.__aenter__()
        try:
            self._gate.enter()
        except BaseException:
            await self._inflight.__aexit__(None, None, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.leave()
        await self._inflight.__aexit__(kind, value, trace)

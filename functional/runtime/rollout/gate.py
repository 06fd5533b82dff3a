"""The admission gate, which keeps rollouts and policy updates apart, and the limit of what is under way."""

import asyncio
import threading
from contextlib import AbstractAsyncContextManager, nullcontext
from types import TracebackType

from functional.runtime.errors import AdmissionShutError, RolloutError


class AdmissionGate:
    """Lets rollouts in while open; `close_and_drain` shuts it and waits until none is under way.

    Thread-safe; a refit closes it from another thread than the one that generates. version: the policy version of the
    fleet behind it, once there is one; newest: what engines may compute with, which during an update is the next one
    from the resume on, while rollouts may still be inside: `confirmed` says to them what becomes of it.
    """

    def __init__(self, waits: bool = False) -> None:
        """waits: whether `admit` waits while the gate is shut, as generation beside training must, or raises."""
        self.version: int | None = None
        self.newest: int | None = None
        self._waits = waits
        self._is_confirmed = True
        self._waiting: list[asyncio.Future[None]] = []
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

    def enter(self) -> int | None:
        """Count a rollout in; returns the version that it is asked of. Raises AdmissionShutError while the gate is
        shut."""
        with self._condition:
            if not self._open:
                raise AdmissionShutError("rollout refused: admission is shut (an update is under way or has failed)")
            self._inside += 1
            self._entered += 1
            return self.version

    async def admit(self) -> int | None:
        """As `enter`, but where a shut gate has it wait, once it is open."""
        while True:
            with self._condition:
                if self._open or not self._waits:
                    return self.enter()
                opened = self._await_opening()
            await opened

    def try_out(self, version: int) -> None:
        """Engines go on with this version, which is not confirmed until the gate opens."""
        with self._condition:
            self.newest, self._is_confirmed = version, False

    async def confirmed(self) -> None:
        """Wait while engines try out a version, for who has an answer that it may have a part in. If the version is
        refused, whoever gives up the rollouts inside ends this wait with them."""
        while True:
            with self._condition:
                if self._is_confirmed:
                    return
                opened = self._await_opening()
            await opened

    def _await_opening(self) -> "asyncio.Future[None]":
        opened = asyncio.get_running_loop().create_future()
        self._waiting.append(opened)
        return opened

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

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether no rollout is under way any more, after so long at most."""
        with self._condition:
            return self._condition.wait_for(lambda: self._inside == 0, timeout_s)

    def reopen(self, version: int | None = None) -> None:
        """Let rollouts in, those first that wait. version: of the fleet from now on, if it is another."""
        with self._condition:
            self._open = self._is_confirmed = True
            if version is not None:
                self.version = self.newest = version
            waiting, self._waiting = self._waiting, []
        for opened in waiting:
            opened.get_loop().call_soon_threadsafe(_let_in, opened)


def _let_in(opened: "asyncio.Future[None]") -> None:
    if not opened.done():  # one that was given up
        opened.set_result(None)


class Admission:
    """What a rollout passes before it is sent: the limit of its client, then the gate."""

    def __init__(self, gate: AdmissionGate, max_inflight: int | None, waits: bool = True) -> None:
        """max_inflight: rollouts under way at a time, None for all of them; waits: as `AdmissionGate.admit` does, or,
        like `enter`, never."""
        self._gate = gate
        self._waits = waits
        self._inflight: AbstractAsyncContextManager[object] = (
            nullcontext() if max_inflight is None else asyncio.Semaphore(max_inflight)
        )

    async def __aenter__(self) -> int | None:
        """Returns the version that the rollout is asked of. Raises as `AdmissionGate.admit`."""
        await self._inflight.__aenter__()
        try:
            return await self._gate.admit() if self._waits else self._gate.enter()
        except BaseException:
            await self._inflight.__aexit__(None, None, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.leave()
        await self._inflight.__aexit__(kind, value, trace)

"""The state machine of a refit. It alone opens and shuts admission, and keeps a log of every transition.

docs/refit.md shows it as a diagram; `TABLE` is the whole of it.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from functional.runtime.errors import RefitError
from functional.runtime.rollout.gate import AdmissionGate


class State(StrEnum):
    """Where the fleet stands. Admission is open in `serving` and nowhere else."""

    UNPROVED = "unproved"  # started, and holds weights nobody has proved
    SERVING = "serving"  # every worker proved at one version
    DRAINING = "draining"  # the rollouts under way come to their end
    PAUSING = "pausing"  # the probe's prompt seen in the cache, workers paused, caches cleared
    SENDING = "sending"  # group formed, reload reset and started, tensors sent, reload finished
    PROVING = "proving"  # each worker hashes what it holds
    CLEARING = "clearing"  # caches cleared once more
    COMMITTING = "committing"  # version set everywhere, and read back
    RESUMING = "resuming"  # workers take requests again, from the probe alone
    PROBING = "probing"  # engine and trainer agree at the new version, not at the old; the clear is seen
    RECOVERING = "recovering"  # lost workers are replaced, the group is gone
    STOPPED = "stopped"  # no way on; the last transition's reason says why


class Event(StrEnum):
    """What moves the machine."""

    BEGIN = "begin"
    DONE = "done"
    FAILED = "failed"
    GIVE_UP = "give up"


PATH = (
    State.DRAINING,
    State.PAUSING,
    State.SENDING,
    State.PROVING,
    State.CLEARING,
    State.COMMITTING,
    State.RESUMING,
    State.PROBING,
    State.SERVING,
)
"""One attempt, from the first state to the last."""

TABLE: dict[tuple[State, Event], State] = (
    {(at_rest, Event.BEGIN): State.DRAINING for at_rest in (State.UNPROVED, State.SERVING)}
    | {(here, Event.DONE): there for here, there in itertools.pairwise(PATH)}
    | {(here, Event.FAILED): State.RECOVERING for here in (State.UNPROVED, *PATH)}
    | {(State.RECOVERING, Event.DONE): State.DRAINING, (State.RECOVERING, Event.GIVE_UP): State.STOPPED}
)


@dataclass(frozen=True)
class Transition:
    """One line of the log. time: seconds since the epoch; seconds: spent in `before`; version: being brought about."""

    time: float
    seconds: float
    before: State
    event: Event
    after: State
    version: int | None
    attempt: int
    admission: bool
    reason: str


class RefitMachine:
    """Holds the state. `version` and `attempt` are set by who drives it, and go into the log."""

    def __init__(
        self, gate: AdmissionGate, on_transition: Callable[[Transition], None] = lambda transition: None
    ) -> None:
        """Shuts admission: nothing is proved yet."""
        self.state = State.UNPROVED
        self.version: int | None = None
        self.attempt = 0
        self.log: list[Transition] = []
        self._gate = gate
        self._on_transition = on_transition
        self._since = time.monotonic()
        gate.shut()

    def fire(self, event: Event, reason: str = "") -> None:
        """Move on. Raises RefitError for an event that has no place in the present state."""
        after = TABLE.get((self.state, event))
        if after is None:
            raise RefitError(f"refit: «{event}» has no place while {self.state}{self._why()}")
        before, self.state = self.state, after
        now, seconds = time.time(), time.monotonic() - self._since
        self._since = time.monotonic()
        if after is State.SERVING:
            self._gate.reopen(self.version)
        else:
            self._gate.shut()
        transition = Transition(
            now, seconds, before, event, after, self.version, self.attempt, self._gate.is_open, reason
        )
        self.log.append(transition)
        self._on_transition(transition)

    def _why(self) -> str:
        return f" ({self.log[-1].reason})" if self.state is State.STOPPED else ""

"""Checks of a run that generates while it trains: how old its samples were, what overlapped, and what must not."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from functional.runtime.refit.machine import State, Transition
from functional.runtime.rollout.completion import Completion
from functional.runtime.rollout.requests import Attempt
from functional.suite.checklist import Checklist
from functional.suite.intervals import Interval, common, total
from functional.suite.report import Asynchronous


@dataclass(frozen=True)
class TrainedOn:
    """One sample, and `trained`: the version that the trainer had when it learned from it."""

    request_id: str
    trained: int
    policy_version: int | None
    last_version: int | None
    sent_at: float
    answered_at: float

    @classmethod
    def of(cls, completion: Completion, trained: int) -> Self:
        return cls(
            completion.request_id,
            trained,
            completion.policy_version,
            completion.last_version,
            completion.sent_at,
            completion.answered_at,
        )


def count_ages(samples: Iterable[TrainedOn]) -> dict[int, int]:
    """Age in policy versions → samples."""
    return dict(sorted(Counter(s.trained - s.policy_version for s in samples if s.policy_version is not None).items()))


class ServedVersions:
    """Which policy version the fleet had when, as the refit's own log has it."""

    def __init__(self, transitions: Sequence[Transition]) -> None:
        served = [(t.time, t.version) for t in transitions if t.after is State.SERVING and t.version is not None]
        self._times = [time for time, _ in served]
        self._versions = [version for _, version in served]

    def at(self, time: float) -> int | None:
        """The last one that it had reached by then."""
        place = bisect_right(self._times, time)
        return self._versions[place - 1] if place else None


def check_ages(
    checks: Checklist, samples: Sequence[TrainedOn], bound: int, transitions: Sequence[Transition], in_flight: bool
) -> None:
    """No sample that was trained on is older than the bound, and each is of the version that the refit's log gives for
    the time when it was sent. in_flight: where updates do not wait, that version may be a later one."""
    served = ServedVersions(transitions)
    problems = []
    for sample in samples:
        made = sample.policy_version
        if made is None or not 0 <= sample.trained - made <= bound:
            problems.append(f"{sample.request_id}: of version {made}, trained on at {sample.trained}")
            continue
        told = served.at(sample.sent_at)
        if told is None or made > told or (made < told and not in_flight):
            problems.append(f"{sample.request_id}: noted as of version {made}, sent while the fleet had {told}")
    ages = count_ages(samples)
    shown = ", ".join(f"{count} of age {age}" for age, count in ages.items())
    checks.add(
        "async.age_bounded",
        bool(samples) and not problems,
        "; ".join(problems[:3]) or f"{len(samples)} samples: {shown}; at most {bound} policy versions",
        bound=bound,
        ages={str(age): count for age, count in ages.items()},
    )


def check_overlap(checks: Checklist, found: Asynchronous) -> None:
    """Rollouts were under way while the trainer took steps."""
    checks.add(
        "async.overlap",
        found.both_s > 0,
        f"{found.both_s:.3f} of {found.training_s:.3f} s of training with rollouts under way; trainer idle "
        f"{found.trainer_idle_s:.3f}, engines {found.engines_idle_s:.3f} of {found.seconds:.3f} s",
        both_s=found.both_s,
        training_s=found.training_s,
        generating_s=found.generating_s,
    )


def update_windows(transitions: Sequence[Transition]) -> list[Interval]:
    """When workers were paused and changed: from the end of the drain until the fleet serves, or the attempt failed."""
    windows, began = [], None
    for transition in transitions:
        if transition.after is State.PAUSING:
            began = transition.time
        elif began is not None and transition.after in (State.SERVING, State.RECOVERING):
            windows.append(Interval(began, transition.time))
            began = None
    return windows


def check_no_update_in_flight(
    checks: Checklist, attempts: Iterable[Attempt], transitions: Sequence[Transition]
) -> None:
    """No request of a rollout was under way while workers were updated."""
    windows = update_windows(transitions)
    rollouts = [Interval(a.sent_at, a.ended_at) for a in attempts if a.purpose == "rollout"]
    met = [
        window for window in windows if any(one.began < window.ended and one.ended > window.began for one in rollouts)
    ]
    checks.add(
        "async.no_update_in_flight",
        bool(windows) and bool(rollouts) and not met,
        f"{len(met)} of {len(windows)} updates met rollouts under way, of {len(rollouts)} requests",
        updates=len(windows),
        met=len(met),
    )


def busy_and_idle(
    span: Interval, training: Sequence[Interval], generating: Sequence[Interval]
) -> tuple[float, float, float]:
    """Seconds of training, of generation, and of both at once, within a span. The others are unions."""
    training, generating = common([span], training), common([span], generating)
    return total(training), total(generating), total(common(training, generating))

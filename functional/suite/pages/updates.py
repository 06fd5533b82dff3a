"""What happened to a run's policy updates: transitions of the transaction, and faults with how each ended."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from functional.runtime.refit.machine import Event, State, Transition
from functional.suite.report import Report

MOST_UPDATES = 12
"""Updates without a failure that are shown, the last ones."""


@dataclass(frozen=True)
class Update:
    """One attempt at one update. `path`: states and the seconds spent in each, in order."""

    version: int | None
    attempt: int
    path: list[tuple[str, float]]
    ended: str
    reason: str
    failed: bool


@dataclass(frozen=True)
class Fault:
    """What went wrong, and how it ended."""

    what: str
    ended: str
    well: bool


def updates(report: Report) -> tuple[list[Update], int]:
    """Every attempt that failed, the last others, in order; and how many were left out."""
    groups = groupby(report.refit_transitions, key=lambda one: (one.version, one.attempt))
    every = [_update(version, attempt, list(held)) for (version, attempt), held in groups]
    plain = [one for one in every if not one.failed]
    shown = [one for one in every if one.failed or one in plain[-MOST_UPDATES:]]
    return shown, len(every) - len(shown)


def _update(version: int | None, attempt: int, held: list[Transition]) -> Update:
    failures = [one.reason for one in held if one.event in (Event.FAILED, Event.GIVE_UP)]
    path = [(str(one.before), one.seconds) for one in held if one.event is not Event.BEGIN]
    return Update(version, attempt, path, str(held[-1].after), "; ".join(failures), bool(failures))


def faults(report: Report) -> list[Fault]:
    """Injected ones and others."""
    found = [*_of_updates(report), *_of_cases(report), *_of_samples(report)]
    if report.error is not None:
        found.append(Fault(report.error.splitlines()[0], "the run ended", False))
    return found


def _of_updates(report: Report) -> Iterator[Fault]:
    for refit in report.refits:
        for new in refit.replaced:
            ended = f"replaced and routed after {new.seconds:.1f} s; its weights were proved (version {refit.version})"
            reason = new.reason.removeprefix(f"worker {new.worker}: ")
            yield Fault(f"worker {new.worker} lost: {reason}", ended, True)
        if refit.version != refit.asked:
            what = f"the update to version {refit.asked} failed {refit.attempts} time(s)"
            yield Fault(what, f"the fleet went back to version {refit.version}, proved alike", True)
    for one in report.refit_transitions:
        if one.after is State.STOPPED:
            yield Fault(one.reason, "no way on: admission stays closed", False)


def _of_cases(report: Report) -> Iterator[Fault]:
    for case in report.fault_cases or []:
        failed = [c.name for c in report.checks if c.name.startswith(f"{case.case}.") and not c.passed]
        ended = f"{len(failed)} checks failed: {', '.join(failed[:3])}" if failed else "as it must"
        yield Fault(f"case {case.case}", f"{ended}, after {case.seconds:.1f} s", not failed)


def _of_samples(report: Report) -> Iterator[Fault]:
    if report.lost_samples:
        count = len(report.lost_samples)
        yield Fault(f"{count} sample(s) lost: {report.lost_samples[0].reason}", "generated again", True)

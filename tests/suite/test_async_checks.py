"""Each check of a run that generates while it trains, passing, and failing for what it is there for."""

from dataclasses import replace

import pytest

from functional.runtime.refit.machine import Event, State, Transition
from functional.runtime.rollout.requests import Attempt
from functional.suite.async_checks import (
    TrainedOn,
    busy_and_idle,
    check_ages,
    check_no_update_in_flight,
    check_overlap,
    update_windows,
)
from functional.suite.checklist import Checklist
from functional.suite.intervals import Interval, common, total, union
from functional.suite.report import Asynchronous


def update(version, at, failed_first=False):
    """The transitions of an update that drains at `at`, pauses a second later, and serves another later."""
    states = [State.DRAINING, State.PAUSING, State.SERVING]
    if failed_first:
        states = [State.DRAINING, State.PAUSING, State.RECOVERING, State.DRAINING, State.PAUSING, State.SERVING]
    return [
        Transition(at + n, 1.0, State.SERVING, Event.DONE, state, version, 1, False, "")
        for n, state in enumerate(states)
    ]


LOG = [*update(0, 0), *update(1, 10), *update(2, 20)]
"""Serving version 0 from 2 on, 1 from 12 on, 2 from 22 on; paused from 11 to 12 and from 21 to 22."""
SAMPLES = [
    TrainedOn("a", trained=0, policy_version=0, last_version=0, sent_at=3, answered_at=4),
    TrainedOn("b", trained=1, policy_version=0, last_version=0, sent_at=5, answered_at=9),
    TrainedOn("c", trained=2, policy_version=1, last_version=1, sent_at=13, answered_at=19),
]


def verdict(name, check, *arguments):
    checks = Checklist()
    check(checks, *arguments)
    (found,) = checks.checks
    assert found.name == name
    return found


def ages(samples, bound=1, in_flight=False):
    return verdict("async.age_bounded", check_ages, samples, bound, LOG, in_flight)


def test_samples_within_the_bound_of_the_versions_that_the_log_has():
    found = ages(SAMPLES)
    assert found.passed
    assert found.figures["ages"] == {"0": 1, "1": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trained": 3}, "of version 1, trained on at 3"),
        ({"trained": 0}, "of version 1, trained on at 0"),
        ({"policy_version": None}, "of version None"),
        ({"policy_version": 2}, "noted as of version 2, sent while the fleet had 1"),
        ({"sent_at": 23}, "noted as of version 1, sent while the fleet had 2"),
        ({"sent_at": 1}, "sent while the fleet had None"),
    ],
)
def test_one_that_is_too_old_or_of_another_version_than_noted_fails(change, words):
    found = ages([*SAMPLES[:2], replace(SAMPLES[2], **change)])
    assert not found.passed
    assert words in found.detail


def test_no_sample_proves_nothing():
    assert not ages([]).passed


def test_where_updates_do_not_wait_an_attempt_may_be_sent_later_than_it_was_let_in():
    late = replace(SAMPLES[2], sent_at=23)
    assert ages([late], in_flight=True).passed
    assert not ages([late]).passed


def attempt(sent_at, ended_at, purpose="rollout"):
    return Attempt("r", "s", purpose, 1, "accepted", None, sent_at, ended_at)


def in_flight(*attempts, log=LOG):
    return verdict("async.no_update_in_flight", check_no_update_in_flight, list(attempts), log)


def test_rollouts_between_updates_pass():
    assert in_flight(attempt(3, 9), attempt(3, 10.9), attempt(12, 20)).passed


@pytest.mark.parametrize("met", [(10.5, 11.5), (11.2, 11.4), (11.5, 15), (5, 15)])
def test_a_rollout_under_way_while_workers_are_updated_fails(met):
    found = in_flight(attempt(3, 9), attempt(*met))
    assert not found.passed
    assert found.figures == {"updates": 3, "met": 1}


def test_probes_belong_to_updates():
    assert in_flight(attempt(3, 9), attempt(11, 12, "probe")).passed


def test_neither_updates_nor_rollouts_prove_nothing():
    assert not in_flight().passed
    assert not in_flight(attempt(3, 9), log=[]).passed


def test_a_failed_attempt_has_a_window_of_its_own():
    assert update_windows(update(1, 10, failed_first=True)) == [Interval(11, 12), Interval(14, 15)]


def overlapping(both_s):
    return Asynchronous(
        bound=1,
        in_flight_updates=False,
        seconds=9,
        training_s=4,
        generating_s=5,
        both_s=both_s,
        trainer_waited_s=1,
        trainer_idle_s=5,
        engines_idle_s=4,
        ages={0: 1},
        spanning=0,
        unused=0,
    )


@pytest.mark.parametrize(("both_s", "passes"), [(0.5, True), (0.0, False)])
def test_a_loop_in_turns_has_no_overlap(both_s, passes):
    assert verdict("async.overlap", check_overlap, overlapping(both_s)).passed is passes


def test_busy_idle_and_both():
    training = union([Interval(2, 4), Interval(6, 8)])
    generating = union([Interval(0, 1), Interval(3, 5), Interval(3.5, 7), Interval(9, 99)])
    assert generating == [Interval(0, 1), Interval(3, 7), Interval(9, 99)]
    assert busy_and_idle(Interval(0, 10), training, generating) == (4, 6, 2)
    assert total(common(training, [])) == 0

"""FleetRefit over simulated workers: its results, its errors when it stops, and the ranks in a group."""

import asyncio
import itertools
from contextlib import suppress

import pytest
from refit_world import Chooser, World

from functional.runtime.errors import InterruptedRunError, RefitError
from functional.runtime.refit.machine import Event, State
from functional.runtime.refit.probe import ProbeScore
from functional.runtime.refit.transaction import rank_geometry
from functional.runtime.rollout.pool import HttpPool

UNDISTURBED = Chooser([], 0)


class Scripted:
    """Outcomes by turn: `at(n, outcome)` makes the nth pick that can have this outcome have it."""

    def __init__(self, outcome="", turns=()):
        self.outcome, self.turns, self.seen = outcome, set(turns), itertools.count()

    def pick(self, options):
        return self.outcome if self.outcome in options and next(self.seen) in self.turns else options[0]


def world_at(version, chooser=UNDISTURBED, **options):
    world = World(UNDISTURBED, **options)
    assert world.refit.update(version).reached
    world.chooser = chooser
    return world


def test_admission_is_shut_until_a_first_version_is_proved():
    world = World(UNDISTURBED)
    assert not world.gate.is_open
    result = world.refit.update(0)
    assert world.gate.is_open
    assert (result.version, result.attempts, result.proved, result.replaced) == (0, 1, 1, [])
    assert [t.after for t in result.transitions][-2:] == [State.PROBING, State.SERVING]
    assert {probe.reading.previous for probe in result.probes} == {5.0}
    assert all(probe.cached_before > 0 and probe.cached_after == 0 for probe in result.probes)


@pytest.mark.parametrize(
    ("to_new", "to_other", "attempts"),
    [
        pytest.param(0.05, 0.5, 1, id="nearer to the new one"),
        pytest.param(0.5, 0.05, 2, id="clearly the other"),
        pytest.param(0.5, 0.0, 2, id="exactly the other"),
        pytest.param(0.5, 0.5, 1, id="as far from both: a repeat could not mend it"),
        pytest.param(float("nan"), 0.09, 2, id="not a number"),
    ],
)
def test_a_probe_fails_an_attempt_when_it_tells_the_other_version(to_new, to_other, attempts):
    world = world_at(0, attempts=2, workers=1)
    rounds = []

    def score(version, prompt):
        rounds.append(prompt)
        if len(rounds) == 1:
            return ProbeScore([1.0 + to_new] * (len(prompt) - 1), [1.0 + to_other] * (len(prompt) - 1))
        return World.score(world, version, prompt)

    world.score = score
    assert world.refit.update(1).attempts == attempts


def test_from_the_resume_on_a_rollout_may_end_under_the_new_version():
    """One that an update did not wait for, say, and that is answered while the probe runs."""
    world, seen, waited = world_at(0), [], []
    probe = world.refit._probe

    def noted(worker, number):
        waiting = asyncio.run_coroutine_threadsafe(world.gate.confirmed(), pool._loop)
        waited.append(waiting)
        seen.append((world.refit.state, world.gate.version, world.gate.newest, is_done(waiting)))
        return probe(worker, number)

    world.refit._probe = noted
    with HttpPool() as pool:
        world.refit.update(1)
        assert all(is_done(waiting) for waiting in waited)
    assert set(seen) == {(State.SERVING, 0, 0, True), (State.PROBING, 0, 1, False)}
    assert (world.gate.version, world.gate.newest) == (1, 1)


def is_done(waiting):
    with suppress(TimeoutError):
        return waiting.result(0.2) is None
    return False


def test_a_send_that_fails_once_is_tried_again():
    result = world_at(0, Scripted("fails", {2}), attempts=2).refit.update(1)  # after a probe on each worker
    assert (result.version, result.attempts) == (1, 2)
    failed = [t for t in result.transitions if t.event is Event.FAILED]
    assert [(t.before, t.version, t.attempt, t.admission) for t in failed] == [(State.SENDING, 1, 1, False)]
    assert failed[0].reason


def test_a_version_that_fails_for_good_leads_back_to_the_one_before():
    class Failing:
        def pick(self, options):
            return "fails" if "lost" in options and world.refit._machine.version == 1 else options[0]

    world = world_at(0, attempts=3)
    world.chooser = Failing()
    result = world.refit.update(1)
    assert (result.asked, result.version, result.attempts, result.reached) == (1, 0, 4, False)
    assert world.gate.is_open
    assert {engine.weights for engine in world.engines} == {0}


def test_a_hanging_worker_is_replaced_in_its_slot():
    world = world_at(0, Scripted("hangs", {0}), attempts=2)
    survivor = world.workers[1].instance_id
    result = world.refit.update(1)
    assert result.reached
    assert [(r.worker, r.old_instance) for r in result.replaced] == [(0, 1)]
    assert [w.instance_id for w in world.refit.workers] == [result.replaced[0].new_instance, survivor]


def test_workers_that_died_while_serving_are_replaced_before_the_first_attempt():
    world = world_at(3)
    for engine in world.engines:
        engine.end = "killed"
    result = world.refit.update(3)
    assert (result.version, result.attempts, len(result.replaced)) == (3, 1, 2)
    assert [t.before for t in result.transitions[:2]] == [State.SERVING, State.RECOVERING]
    assert world.gate.is_open


def test_without_a_way_to_replace_the_run_stops_with_the_reason():
    world = world_at(0, replaceable=False)
    world.engines[0].end = "killed"
    with pytest.raises(RefitError, match="connection refused; nothing here can replace a worker"):
        world.refit.update(1)
    assert (world.refit.state, world.gate.is_open) == (State.STOPPED, False)


def test_a_lost_sender_is_not_waited_for_again():
    world = world_at(0, Scripted("lost", {0}), attempts=5)
    with pytest.raises(RefitError, match="the sender is gone; the workers' last proved version was 0"):
        world.refit.update(1)
    assert [t.event for t in world.refit.log][-2:] == [Event.FAILED, Event.GIVE_UP]
    assert not world.gate.is_open
    with pytest.raises(RefitError, match="stopped"):
        world.refit.update(1)


def test_rollouts_that_do_not_end_keep_admission_shut():
    world = world_at(0)
    world.gate.enter()
    with pytest.raises(RefitError, match="1 rollouts still under way"):
        world.refit.update(1)
    assert not world.gate.is_open
    assert world.engines[0].weights == 0


def test_an_update_that_does_not_wait_freezes_the_rollouts_under_way():
    world = world_at(0, in_flight=True)
    world.gate.enter()
    assert world.refit.update(1).reached
    assert [(engine.weights, engine.frozen) for engine in world.engines] == [(1, True), (1, True)]
    assert world.gate.idle_since() is None, "the rollout goes on"
    assert world.given_up == []


def test_an_update_that_waits_pauses_engines_without_rollouts():
    world = world_at(0)
    assert world.refit.update(1).reached
    assert not any(engine.frozen for engine in world.engines)


@pytest.mark.parametrize(("outcome", "turn"), [("refused", 0), ("killed", 6)])
def test_rollouts_under_way_in_a_failed_attempt_are_given_up_before_a_worker_is_replaced(outcome, turn):
    """They may have met weights that nobody proved."""
    world = world_at(0, Scripted(outcome, [turn]), attempts=2, in_flight=True)
    world.gate.enter()
    result = world.refit.update(1)
    assert (result.version, result.attempts) == (1, 2)
    assert world.given_up == [2]
    assert world.instances == (3 if outcome == "killed" else 2)
    assert world.gate.idle_since() is not None


def test_a_run_told_to_stop_does_not_try_again():
    world = world_at(0, attempts=5)

    def interrupted(version, completions):
        raise InterruptedRunError("stopped by SIGTERM")

    world.score = interrupted
    with pytest.raises(RefitError, match="SIGTERM"):
        world.refit.update(1)
    assert (world.refit.state, world.gate.is_open) == (State.PROBING, False)


def test_an_unexpected_error_of_the_trainer_is_a_failed_attempt():
    world = world_at(0, attempts=2)

    def broken(version):
        raise KeyError("names")

    world.metadata = broken
    with pytest.raises(RefitError, match="3 attempts failed, the first: KeyError"):
        world.refit.update(1)
    assert not world.gate.is_open


@pytest.mark.parametrize("plan", [False, True])
def test_a_stale_worker_must_refuse_and_a_dead_one_is_no_refusal(plan):
    world = world_at(0, plan=plan)
    assert "weights not proved" in world.refit.stale_is_refused(1)
    with pytest.raises(RefitError, match="the proof proves nothing"):
        world.refit.stale_is_refused(0)
    world.engines[0].end = "killed"
    assert "worker 1" in world.refit.stale_is_refused(1)
    world.engines[1].end = "killed"
    with pytest.raises(RefitError, match="no worker could be asked"):
        world.refit.stale_is_refused(1)


@pytest.mark.parametrize(("workers", "ranks"), list(itertools.product([1, 2, 3, 8], [1, 2, 4, 8])))
def test_every_rank_of_a_group_has_one_seat(workers, ranks):
    """An engine's worker adds its own rank (pipeline × tensor) to the offset, as transfer_engine.worker_rank does."""
    world_size, offsets = rank_geometry(workers, ranks)
    seats = [0, *(offset + own for offset in offsets for own in range(ranks))]
    assert seats == list(range(world_size))


def test_the_proof_is_asked_for_anew_at_each_attempt_once_every_worker_has_finished():
    """Its key is drawn then: after the last copy."""
    world = world_at(0, attempts=2)
    asked, answer = [], world.proof

    def proof(version):
        asked.append([engine.weights for engine in world.engines])
        if len(asked) == 1:
            world.engines[1].weights = None  # the first attempt's proof is refused
        return answer(version)

    world.proof = proof
    assert world.refit.update(1).attempts == 2
    assert asked == [[1, 1], [1, 1]]

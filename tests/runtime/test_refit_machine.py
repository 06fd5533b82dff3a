"""The refit's state machine: its table, and every path through the real FleetRefit over simulated workers."""

import itertools

import pytest
from refit_world import Chooser, Unsound, World, explore

from functional.runtime.errors import RefitError
from functional.runtime.refit.machine import PATH, TABLE, Event, RefitMachine, State
from functional.runtime.refit.transaction import FleetRefit
from functional.runtime.rollout.gate import AdmissionGate


def test_every_state_but_stopped_has_a_way_on_and_every_failure_leads_to_recovery():
    assert {state for state, _ in TABLE} == set(State) - {State.STOPPED}
    assert {after for (_, event), after in TABLE.items() if event is Event.FAILED} == {State.RECOVERING}
    assert {before for (before, _), after in TABLE.items() if after is State.SERVING} == {State.PROBING}


def test_serving_is_reached_only_through_proof_clear_commit_and_probe():
    """Without any one of these states, no path leads to serving."""
    for missing in PATH[:-1]:
        reachable, seen = [State.UNPROVED], {State.UNPROVED}
        while reachable:
            here = reachable.pop()
            for there in (after for (before, _), after in TABLE.items() if before is here and after is not missing):
                if there not in seen:
                    seen.add(there)
                    reachable.append(there)
        assert State.SERVING not in seen


def test_admission_follows_the_state_for_every_sequence_of_events():
    for events in itertools.product(Event, repeat=4):
        gate = AdmissionGate()
        machine = RefitMachine(gate)
        assert not gate.is_open
        for event in [Event.BEGIN, *[Event.DONE] * 7, *events]:
            try:
                machine.fire(event, "why")
            except RefitError:
                assert (machine.state, event) not in TABLE
            assert gate.is_open == (machine.state is State.SERVING)
        assert [t.admission for t in machine.log] == [t.after is State.SERVING for t in machine.log]


def two_updates(chooser, attempts, plan):
    """To version 0 undisturbed, to 1 with faults, and where that ends well, to 2 undisturbed."""
    chooser.active = False
    world = World(chooser, attempts, plan=plan)
    assert world.refit.update(0).reached
    world.serve()
    chooser.active = True
    try:
        result = world.refit.update(1)
    except RefitError:
        assert world.refit.log[-1].reason
        assert world.refit.state is State.STOPPED
        assert not world.gate.is_open
        with pytest.raises(RefitError, match="stopped"):
            world.refit.update(2)
        return "stopped"
    world.serve()
    assert result.version == world.refit.version
    assert result.version in (0, 1)
    chooser.active = False
    if not any(engine.sticky or engine.end for engine in world.engines):
        assert world.refit.update(2).reached
        world.serve()
    return "reached" if result.reached else "back"


@pytest.mark.parametrize(
    ("attempts", "max_faults", "possible"),
    [(1, 2, {"reached", "back", "stopped"}), (3, 1, {"reached", "stopped"})],
)
@pytest.mark.parametrize("plan", [False, True])
def test_no_path_admits_a_request_in_a_mixed_state(attempts, max_faults, possible, plan):
    """Every call of an update refused, late, hung, fatal or without effect; the world asserts at each of them."""
    ends = {"reached": 0, "back": 0, "stopped": 0}

    def scenario(chooser: Chooser) -> None:
        ends[two_updates(chooser, attempts, plan)] += 1

    paths = explore(scenario, max_faults)
    print(f"{paths} paths with at most {max_faults} fault(s), {attempts} attempt(s): {ends}")
    assert sum(ends.values()) == paths
    assert {end for end, count in ends.items() if count} == possible


@pytest.mark.parametrize("left_out", [["_commit"], ["_prove", "_judge_probes"], ["_clear", "_judge_probes"]])
@pytest.mark.parametrize("plan", [False, True])
def test_the_check_notices_when_a_part_of_the_update_does_nothing(monkeypatch, left_out, plan):
    """Proof and clear are each backed by the probe, so that one has to go too."""
    for method in left_out:
        monkeypatch.setattr(FleetRefit, method, lambda refit, result: None)
    with pytest.raises(Unsound):
        explore(lambda chooser: two_updates(chooser, 1, plan), 1)

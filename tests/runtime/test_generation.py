"""What becomes of a batch when some of its requests are lost: the others are kept, and those are named."""

import asyncio
import threading

import pytest

from functional.runtime.errors import ProcessDiedError, RolloutError
from functional.runtime.rollout import generation
from functional.runtime.rollout.client import Limits, RolloutClient
from functional.runtime.rollout.completion import Completion, Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.generation import generate
from functional.runtime.rollout.pool import HttpPool

SAMPLING = Sampling(4)


class Lossy(RolloutClient):
    """Answers at once, but loses prompts that begin with 9 and never answers those that begin with 8."""

    shared: HttpPool

    def __init__(self, gate):
        super().__init__(self.shared, "http://127.0.0.1:1", "m", gate, Limits(10, 100, 8), 1)
        self.asked = []

    async def send(self, prompt, sampling, instance_id, purpose):
        self.asked.append(tuple(prompt))
        if prompt[0] == 9:
            raise RolloutError("lost")
        if prompt[0] == 8:
            await asyncio.sleep(60)
        return Completion("r", tuple(prompt), (1,), (-1.0,), 1, 0, None, 0.0, 0.0, None)


@pytest.fixture(autouse=True, scope="module")
def pool():
    with HttpPool() as Lossy.shared:
        yield


def complete(prompts, give_up_after=None, gate=None):
    gate = gate or AdmissionGate()

    async def run():
        given_up = asyncio.Event()
        if give_up_after is not None:
            asyncio.get_running_loop().call_later(give_up_after, given_up.set)
        return await Lossy(gate).complete_each(prompts, SAMPLING, given_up)

    outcomes = Lossy.shared.run(run())
    gate.close_and_drain(0)  # raises when one is still inside
    return outcomes


def test_a_lost_request_ends_no_other():
    first, lost, last = complete([(1,), (9,), (2,)])
    assert (first.prompt_token_ids, last.prompt_token_ids) == ((1,), (2,))
    assert str(lost) == "lost"


def tried_out():
    """A gate that was at 3, in an update whose engines go on with 4."""
    gate = AdmissionGate()
    gate.reopen(3)
    gate.try_out(4)
    return gate


def test_what_was_answered_while_a_version_was_tried_out_is_kept_once_it_is_confirmed():
    gate = tried_out()
    threading.Timer(0.2, lambda: gate.reopen(4)).start()
    (found,) = complete([(1,)], gate=gate)
    assert (found.policy_version, found.last_version) == (3, 4)


def test_what_was_answered_while_a_version_was_tried_out_is_lost_with_it():
    (found,) = complete([(1,)], give_up_after=0.2, gate=tried_out())
    assert str(found) == "given up while under way"


def test_what_is_under_way_when_all_is_given_up_is_lost_and_what_was_answered_is_kept():
    answered, hanging = complete([(1,), (8,)], give_up_after=0.05)
    assert answered.prompt_token_ids == (1,)
    assert "given up" in str(hanging)


class Fleet:
    """Workers of which as many are lost as `lost` says at each look, the last for good."""

    def __init__(self, workers=2, lost=(0,)):
        self.workers = list(range(workers))
        self.lost = list(lost)

    def lost_workers(self):
        return self.workers[: self.lost.pop(0) if len(self.lost) > 1 else self.lost[0]]

    def check_control_plane(self):
        pass


class Batches(Lossy):
    """Gives the outcomes of one batch after the other, and keeps what it was asked for."""

    def __init__(self, *batches):
        super().__init__(AdmissionGate())
        self.batches = list(batches)

    async def complete_each(self, prompts, sampling, given_up):
        self.asked.append(list(prompts))
        return self.batches.pop(0)


class Recovery:
    """What a refit gives to `generate`, and what of it was called."""

    def __init__(self, found=None, can=True):
        self.found, self.told, self.whole, self.updates = found or {}, [], 0, 0
        self.given = {"find_lost": self.find_lost, "make_whole": self.make_whole if can else None}

    def find_lost(self):
        self.told.append("roll call")
        return self.found

    def make_whole(self):
        self.whole += 1

    def generate(self, client, fleet, prompts=((1,), (2,))):
        told = {"on_lost": lambda index, error: self.told.append((index, str(error)))}
        return generate(client, fleet, list(prompts), SAMPLING, **self.given, **told, state=lambda: self.updates)


def sample(attempt=1):
    return Completion("r", (1,), (1,), (-1.0,), 1, 0, None, 0.0, 0.0, None, attempt)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(generation, "DYING_S", 0)


def test_lost_samples_alone_are_generated_again_with_attempt_raised():
    recovery, client = Recovery(), Batches([sample(), RolloutError("lost")], [sample(2)])
    completions = recovery.generate(client, Fleet(lost=[1]))
    assert [completion.attempt for completion in completions] == [1, 3]
    assert client.asked == [[(1,), (2,)], [(2,)]]
    assert (recovery.whole, recovery.told) == (1, [(1, "lost")])


def test_they_are_generated_again_until_the_batch_is_whole():
    lost = RolloutError("lost")
    recovery, client = Recovery(), Batches([sample(), lost, lost], [lost, sample(2)], [sample()])
    completions = recovery.generate(client, Fleet(lost=[1]), [(1,), (2,), (3,)])
    assert [completion.attempt for completion in completions] == [1, 3, 3]
    assert client.asked == [[(1,), (2,), (3,)], [(2,), (3,)], [(2,)]]
    assert (recovery.whole, recovery.told) == (2, [(1, "lost"), (2, "lost"), (1, "lost")])


class Updating(Batches):
    """Each batch meets an update that fails, but the last."""

    def __init__(self, recovery, *batches):
        super().__init__(*batches)
        self.recovery = recovery

    async def complete_each(self, prompts, sampling, given_up):
        self.recovery.updates += len(self.batches) > 1
        return await super().complete_each(prompts, sampling, given_up)


def test_each_update_that_fails_may_cost_the_batch_once_more():
    recovery = Recovery()
    lost = [RolloutError("given up")] * 2
    client = Updating(recovery, lost, lost, lost, [sample(), sample()])
    completions = recovery.generate(client, Fleet())
    assert [completion.attempt for completion in completions] == [4, 4]
    assert recovery.whole == 3
    assert "roll call" not in recovery.told


def test_a_loss_without_a_further_update_or_lost_worker_is_an_error():
    recovery = Recovery()
    client = Updating(recovery, [sample(), RolloutError("given up")], [RolloutError("refused")])
    with pytest.raises(RolloutError, match=r"^refused$"):
        recovery.generate(client, Fleet())
    assert recovery.told[-1] == "roll call"


def test_an_update_that_ends_within_the_roll_call_explains_the_loss():
    recovery = Recovery()

    def find_lost():
        recovery.updates += 1
        return {}

    recovery.given["find_lost"] = find_lost
    assert len(recovery.generate(Batches([sample(), RolloutError("lost")], [sample()]), Fleet())) == 2


def test_workers_lost_one_after_the_other_with_no_answer_in_between_are_an_error():
    """The samples themselves may be what ends them."""
    recovery, client = Recovery(), Batches([sample(), RolloutError("lost")], [RolloutError("lost again")])
    with pytest.raises(RolloutError, match=r"one after the other while 1 samples were generated.*lost again"):
        recovery.generate(client, Fleet(lost=[1]))
    assert recovery.whole == 1


def test_where_nothing_is_lost_nobody_is_asked():
    recovery = Recovery()
    assert len(recovery.generate(Batches([sample(), sample()]), Fleet())) == 2
    assert (recovery.whole, recovery.told) == (0, [])


def test_a_request_that_failed_on_a_whole_fleet_is_an_error():
    recovery = Recovery()
    with pytest.raises(RolloutError, match="lost"):
        recovery.generate(Batches([sample(), RolloutError("lost")]), Fleet())
    assert (recovery.whole, recovery.told) == (0, [(1, "lost"), "roll call"])


def test_a_worker_whose_processes_live_counts_as_lost_by_the_roll_call():
    recovery = Recovery(found={1: "no answer"})
    assert len(recovery.generate(Batches([sample(), RolloutError("lost")], [sample()]), Fleet())) == 2
    assert recovery.whole == 1


def test_a_worker_may_take_a_while_to_die(monkeypatch):
    monkeypatch.setattr(generation, "DYING_S", 60)
    recovery = Recovery()
    recovery.generate(Batches([sample(), RolloutError("lost")], [sample()]), Fleet(lost=[0, 0, 0, 1]))
    assert (recovery.whole, recovery.told) == (1, [(1, "lost")])


def test_without_a_version_to_go_to_the_loss_is_an_error():
    recovery = Recovery(can=False)
    with pytest.raises(RolloutError, match="lost"):
        recovery.generate(Batches([sample(), RolloutError("lost")]), Fleet(lost=[1]))


def test_once_every_worker_is_lost_the_rest_is_given_up(monkeypatch):
    monkeypatch.setattr(generation, "WATCH_INTERVAL_S", 0.05)
    outcomes = generation.complete_under_watch(Lossy(AdmissionGate()), Fleet(lost=[0, 1, 2]), [(1,), (8,)], SAMPLING)
    assert outcomes[0].token_ids == (1,)
    assert "given up" in str(outcomes[1])


def test_what_is_given_up_from_outside_is_lost(monkeypatch):
    monkeypatch.setattr(generation, "WATCH_INTERVAL_S", 0.05)
    looks = []
    gate = AdmissionGate()
    outcomes = generation.complete_under_watch(
        Lossy(gate), Fleet(lost=[0]), [(1,), (8,)], SAMPLING, lambda: bool(looks) or looks.append(1)
    )
    assert outcomes[0].token_ids == (1,)
    assert "given up" in str(outcomes[1])
    gate.close_and_drain(0)


def test_what_the_look_raises_ends_the_batch(monkeypatch):
    monkeypatch.setattr(generation, "WATCH_INTERVAL_S", 0.05)

    def look():
        raise RolloutError("stopped")

    gate = AdmissionGate()
    with pytest.raises(RolloutError, match="stopped"):
        generation.complete_under_watch(Lossy(gate), Fleet(lost=[0]), [(8,)], SAMPLING, look)
    gate.close_and_drain(0)


def test_a_process_that_nothing_replaces_ends_the_batch(monkeypatch):
    def died():
        raise ProcessDiedError("etcd ended")

    fleet = Fleet()
    fleet.check_control_plane = died
    gate = AdmissionGate()
    with pytest.raises(ProcessDiedError, match="etcd"):
        generation.complete_under_watch(Lossy(gate), fleet, [(8,)], SAMPLING)
    gate.close_and_drain(0)

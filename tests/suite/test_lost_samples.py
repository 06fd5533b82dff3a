"""What becomes of a batch when some of its requests are lost: the others are kept, and those are named."""

import asyncio
from types import SimpleNamespace

import pytest

from functional.runtime.errors import RolloutError
from functional.runtime.rollout.client import AdmissionGate, Completion, RolloutClient, Sampling
from functional.suite.report import LostSample
from functional.suite.session import Session

SAMPLING = Sampling(4)


class Lossy(RolloutClient):
    """Answers at once, but loses prompts that begin with 9 and never answers those that begin with 8."""

    def __init__(self, gate):
        super().__init__("http://127.0.0.1:1", gate, 10, 100, 1)
        self.asked = []

    async def _complete(self, http, prompt, sampling, instance_id, purpose):
        self.asked.append(tuple(prompt))
        if prompt[0] == 9:
            raise RolloutError("lost")
        if prompt[0] == 8:
            await asyncio.sleep(60)
        return Completion("r", tuple(prompt), (1,), (-1.0,), 1, 0, None, 0.0, 0.0, None)


def complete(prompts, give_up_after=None):
    gate = AdmissionGate()

    async def run():
        given_up = asyncio.Event()
        if give_up_after is not None:
            asyncio.get_running_loop().call_later(give_up_after, given_up.set)
        return await Lossy(gate).complete_each(prompts, SAMPLING, given_up)

    outcomes = asyncio.run(run())
    gate.close_and_drain(0)  # raises when one is still inside
    return outcomes


def test_a_lost_request_ends_no_other():
    first, lost, last = complete([(1,), (9,), (2,)])
    assert (first.prompt_token_ids, last.prompt_token_ids) == ((1,), (2,))
    assert str(lost) == "lost"


def test_what_is_under_way_when_all_is_given_up_is_lost_and_what_was_answered_is_kept():
    answered, hanging = complete([(1,), (8,)], give_up_after=0.05)
    assert answered.prompt_token_ids == (1,)
    assert "given up" in str(hanging)


@pytest.fixture
def session():
    made = Session.__new__(Session)
    made.report = SimpleNamespace(lost_samples=[])
    made.whole = 0

    def make_whole(parts, error, step):
        made.whole += 1

    made._make_whole = make_whole
    return made


def generate(session, *rounds):
    rounds = iter(rounds)
    session._complete = lambda parts, prompts: next(rounds)
    return session._generate(SimpleNamespace(), [(1,), (2,)], 3)


def sample(attempt=1):
    return Completion("r", (1,), (1,), (-1.0,), 1, 0, None, 0.0, 0.0, None, attempt)


def test_lost_samples_are_generated_again_with_attempt_raised(session):
    completions = generate(session, [sample(), RolloutError("lost")], [sample()])
    assert [completion.attempt for completion in completions] == [1, 2]
    assert session.whole == 1
    assert session.report.lost_samples == [LostSample(step=3, rollout=1, reason="lost")]


def test_they_are_generated_again_once_only(session):
    with pytest.raises(RolloutError, match="lost again"):
        generate(session, [sample(), RolloutError("lost")], [RolloutError("lost again")])
    assert session.whole == 1

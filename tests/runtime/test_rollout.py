"""Which answers may be trained on, which prompts may be sent, and the admission gate."""

import asyncio
import json
import threading
import time

import pytest

from functional.runtime.errors import RolloutError
from functional.runtime.rollout.client import Limits, RolloutClient
from functional.runtime.rollout.completion import Sampling, read_completion
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.sending import Sender

REQUEST = "6f1b2b3c-0000-4000-8000-000000000001"
PROMPT = (5, 6, 7)


def answer(**changes):
    """An answer as Dynamo 1.3.0.post1 gives it, with `a__b=value` changes."""
    body = {
        "id": f"cmpl-{REQUEST}",
        "choices": [{"logprobs": {"token_logprobs": [-0.5, -1.5]}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 2}},
        "nvext": {
            "worker_id": {"decode_worker_id": 42},
            "completion_token_ids": [8, 9],
            "engine_data": {
                "prompt_token_ids": list(PROMPT),
                "completion_token_ids": [8, 9],
                "completion_logprobs": [-0.5, -1.5],
            },
            "timing": {"kv_hit_rate": 0.5},
        },
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = body
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return body


def encoded(**changes):
    return json.dumps(answer(**changes)).encode()


def read(max_tokens=4, **changes):
    return read_completion(encoded(**changes), REQUEST, PROMPT, Sampling(max_tokens), 0.0)


def test_a_whole_answer_has_no_problem():
    completion = read()
    assert completion.problem is None
    assert completion.token_ids == (8, 9)
    assert completion.logprobs == (-0.5, -1.5)
    assert (completion.instance_id, completion.cached_tokens, completion.kv_hit_rate) == (42, 2, 0.5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id": "cmpl-other"}, "another request"),
        ({"choices": [{}, {}]}, "2 choices"),
        ({"nvext__completion_token_ids": None}, "no completion token IDs"),
        ({"nvext": {}}, "no completion token IDs"),
        ({"nvext__completion_token_ids": [8, 10]}, "differ"),
        ({"nvext__engine_data__completion_logprobs": None}, "no completion log-probs"),
        ({"nvext__engine_data__completion_logprobs": [-0.5]}, "1 log-probs for 2"),
        ({"nvext__engine_data__completion_logprobs": [-0.5, None]}, "missing"),
        ({"nvext__engine_data__completion_logprobs": [-0.5, 0.5]}, "above zero"),
        ({"nvext__engine_data__completion_logprobs": [-0.5, -1e308 * 1.7]}, "differ"),
        ({"nvext__engine_data__completion_logprobs": [-0.5, "-1.5"]}, r"completion_logprobs[1]"),
        ({"nvext__engine_data__completion_logprobs": [-0.5, True]}, r"completion_logprobs[1]"),
        ({"nvext__completion_token_ids": [8, 9.5]}, r"completion_token_ids[1]"),
        ({"choices": [{"logprobs": None}]}, "does not hold one log-prob per token"),
        ({"choices": [{"logprobs": {"token_logprobs": [-0.5, -1.0]}}]}, "differ"),
        ({"choices": [{"logprobs": {"token_logprobs": [-0.5, None]}}]}, "differ"),
        ({"choices": []}, "does not hold one log-prob per token"),
        ({"nvext__engine_data__prompt_token_ids": [5, 6, 8]}, "another prompt"),
        ({"nvext__engine_data__prompt_token_ids": None}, "another prompt"),
        ({"nvext__worker_id": {}}, "does not name the worker"),
    ],
)
def test_a_broken_answer_names_its_problem(changes, problem):
    found = read(**changes).problem
    assert found is not None
    assert problem in found


PROMPT_LOGPROBS = [None, {"6": {"logprob": -2.5, "rank": 7}}, {"7": {"logprob": -3.5, "rank": 1}}]


def read_prompt(**changes):
    changes = {"usage__prompt_tokens_details__cached_tokens": 0, **changes}
    return read_completion(encoded(**changes), REQUEST, PROMPT, Sampling(4, prompt_logprobs=True), 0.0)


def test_log_probs_of_the_prompt_are_read_where_they_were_asked_for():
    told = read_prompt(nvext__prompt_logprobs=PROMPT_LOGPROBS)
    assert (told.problem, told.prompt_logprobs) == (None, (-2.5, -3.5))
    cached = read_prompt(nvext__prompt_logprobs=PROMPT_LOGPROBS, usage__prompt_tokens_details__cached_tokens=2)
    assert (cached.problem, cached.prompt_logprobs) == (None, ()), "what was cached has none"
    assert read(nvext__prompt_logprobs=PROMPT_LOGPROBS).prompt_logprobs == ()


@pytest.mark.parametrize(
    "told",
    [
        [],
        PROMPT_LOGPROBS[:2],
        [None, None, PROMPT_LOGPROBS[2]],
        [None, {"8": {"logprob": -2.5}}, PROMPT_LOGPROBS[2]],
    ],
)
def test_log_probs_of_another_prompt_or_of_a_part_of_it_are_none(told):
    assert "prompt's tokens" in str(read_prompt(nvext__prompt_logprobs=told).problem)


def test_more_tokens_than_allowed():
    assert "2 tokens generated, 1 allowed" in (read(max_tokens=1).problem or "")


def test_an_answer_cut_at_its_limit_is_right_and_one_cut_before_it_is_not():
    cut = {"choices": [{"logprobs": {"token_logprobs": [-0.5, -1.5]}, "finish_reason": "length"}]}
    whole = read(max_tokens=2)
    assert (whole.problem, whole.max_tokens, whole.truncated) == (None, 2, False)
    at_limit = read(max_tokens=2, **cut)
    assert (at_limit.problem, at_limit.max_tokens, at_limit.truncated) == (None, 2, True)
    assert "cut after 2 tokens, 3 allowed" in (read(max_tokens=3, **cut).problem or "")


@pytest.fixture
def pool():
    with HttpPool() as pool:
        yield pool


def make_client(pool, url="http://127.0.0.1:9", journal=None, timeout_s=1.0, **options):
    return RolloutClient(pool, url, "m", AdmissionGate(), Limits(100, 16, 8), timeout_s, journal, **options)


def test_max_tokens_is_cut_to_what_each_prompt_leaves_of_the_context(pool, monkeypatch):
    sent = []

    async def answer_with_two_tokens(self, body, request_id, deadline, bound):
        asked = json.loads(body)
        sent.append(asked["max_tokens"])
        return encoded(id=f"cmpl-{request_id}", nvext__engine_data__prompt_token_ids=asked["prompt"])

    monkeypatch.setattr(Sender, "_post", answer_with_two_tokens)
    client = make_client(pool)
    prompts = [[1] * length for length in (1, 12, 13, 14, 15)]
    completions = pool.run(client.complete_all(prompts, Sampling(4)))
    assert sent == [4, 4, 3, 2, 1]
    assert [completion.max_tokens for completion in completions] == [4, 4, 3, 2, 1]
    assert [completion.problem for completion in completions] == [None] * 4 + ["2 tokens generated, 1 allowed"]
    assert pool.run(client.complete_on(7, [[1] * 14], Sampling(400)))[0].max_tokens == 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, 100], "token ID 100, outside the vocabulary of 100"),
        ([-1], "token ID -1"),
        ([1] * 16, "16 tokens leaves no room for an answer in the context of 16"),
        ([1] * 17, "17 tokens leaves no room for an answer in the context of 16"),
    ],
)
def test_what_dynamo_would_answer_badly_is_not_sent(pool, prompt, message):
    # Nothing listens at this address: an attempt to send would fail with another error.
    with pytest.raises(RolloutError, match=message):
        pool.run(make_client(pool).complete_all([prompt], Sampling(1)))


def test_an_unreachable_frontend_is_one_clear_error(pool):
    with pytest.raises(RolloutError, match=r"request .*ClientConnectorError"):
        pool.run(make_client(pool).complete_all([[1, 2]], Sampling(2)))


def test_the_gate_waits_for_what_is_inside_and_then_refuses():
    gate = AdmissionGate()
    gate.enter()
    left = []

    def leave_later():
        time.sleep(0.2)
        left.append(time.monotonic())
        gate.leave()

    thread = threading.Thread(target=leave_later)
    thread.start()
    gate.close_and_drain(5)
    assert left, "drained before the rollout inside had left"
    thread.join()
    with pytest.raises(RolloutError, match="admission is shut"):
        gate.enter()
    gate.reopen()
    gate.enter()


def test_a_gate_that_makes_rollouts_wait_lets_them_in_at_the_version_it_opens_with(pool):
    gate = AdmissionGate(waits=True)
    gate.reopen(3)
    assert pool.run(gate.admit()) == 3
    gate.leave()
    gate.shut()
    waiting = [asyncio.run_coroutine_threadsafe(gate.admit(), pool._loop) for _ in range(2)]
    for one in waiting:
        with pytest.raises(TimeoutError):
            one.result(0.1)
    gate.close_and_drain(0)  # who waits is not inside
    gate.reopen(4)
    assert [one.result(5) for one in waiting] == [4, 4]
    with pytest.raises(RolloutError, match="2 rollouts still under way"):
        gate.close_and_drain(0.05)


def test_who_gives_up_waiting_at_the_gate_is_not_inside_later(pool):
    gate = AdmissionGate(waits=True)
    gate.shut()
    waiting = asyncio.run_coroutine_threadsafe(gate.admit(), pool._loop)
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    waiting.cancel()
    gate.reopen(1)
    assert pool.run(gate.admit()) == 1
    gate.leave()
    gate.close_and_drain(0)


def test_who_was_inside_while_a_version_was_tried_out_waits_for_what_becomes_of_it(pool):
    gate = AdmissionGate()
    gate.reopen(3)
    pool.run(gate.confirmed())
    gate.shut()
    pool.run(gate.confirmed())  # engines have not gone on yet
    gate.try_out(4)
    waiting, cancelled = (asyncio.run_coroutine_threadsafe(gate.confirmed(), pool._loop) for _ in range(2))
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    cancelled.cancel()
    assert (gate.version, gate.newest) == (3, 4)
    gate.reopen(4)
    assert waiting.result(5) is None
    pool.run(gate.confirmed())


def test_a_version_that_is_tried_out_again_under_its_own_number_is_waited_for_too(pool):
    """As after a worker was replaced."""
    gate = AdmissionGate()
    gate.reopen(3)
    gate.try_out(3)
    waiting = asyncio.run_coroutine_threadsafe(gate.confirmed(), pool._loop)
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    gate.reopen(3)
    assert waiting.result(5) is None


def test_a_drain_that_takes_too_long_leaves_the_gate_shut():
    gate = AdmissionGate()
    gate.enter()
    with pytest.raises(RolloutError, match="1 rollouts still under way"):
        gate.close_and_drain(0.05)
    assert not gate.is_open

"""The client over real connections: retries, the cap on rollouts under way, reuse, bounded answers, records."""

import asyncio
import json
import time
import uuid
from pathlib import Path

import pytest
from aiohttp import web

from functional.runtime.errors import RolloutError, RunError
from functional.runtime.rollout.client import Limits, RolloutClient
from functional.runtime.rollout.completion import Sampling, answer_bound
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal, read_attempts

PROMPT = (5, 6, 7)
LIMITS = Limits(vocab_size=100, max_model_len=16, token_bytes=8)


def answer_to(request_id, tokens=2, prompt=PROMPT):
    ids, logprobs = [8] * tokens, [-0.5] * tokens
    engine = {"prompt_token_ids": prompt, "completion_token_ids": ids, "completion_logprobs": logprobs}
    nvext = {"worker_id": {"decode_worker_id": 42}, "completion_token_ids": ids, "engine_data": engine}
    choices = [{"logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop"}]
    return {"id": f"cmpl-{request_id}", "choices": choices, "nvext": nvext}


class Server:
    """Answers as `behave(server, request_id)` says, or with two tokens; keeps who asked."""

    def __init__(self):
        self.behave = None
        self.asked, self.peers, self.inside, self.most = [], set(), 0, 0

    async def complete(self, request):
        request_id = request.headers["x-dynamo-request-id"]
        self.asked.append(request_id)
        self.peers.add(request.transport.get_extra_info("peername"))
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            found = await self.behave(request, len(self.asked)) if self.behave else None
        finally:
            self.inside -= 1
        return found or web.json_response(answer_to(request_id))

    async def start(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"


@pytest.fixture
def pool():
    with HttpPool() as pool:
        yield pool


@pytest.fixture
def server(pool):
    server = Server()
    pool.run(server.start())
    yield server
    pool.run(server.runner.cleanup())


@pytest.fixture
def journal(tmp_path):
    journal = RequestJournal(tmp_path / "requests.jsonl")
    yield journal
    journal.close()


def client_of(pool, server, journal=None, gate=None, **options):
    return RolloutClient(pool, server.url, "m", gate or AdmissionGate(), LIMITS, 5.0, journal, **options)


def test_a_retried_request_is_one_sample_and_each_attempt_is_in_the_journal_before_it_is_returned(
    pool, server, journal, tmp_path
):
    async def fail_first(request, number):
        return web.Response(status=503, text="busy") if number == 1 else None

    server.behave = fail_first
    (completion,) = pool.run(client_of(pool, server, journal).complete_all([PROMPT], Sampling(4)))
    first, second = read_attempts(tmp_path / "requests.jsonl")
    assert (first.outcome, second.outcome) == ("retried", "accepted")
    assert first.reason == "the frontend answered 503: busy"
    assert first.sample == second.sample
    assert [first.request_id, second.request_id] == server.asked
    assert (completion.request_id, completion.attempt) == (second.request_id, 2)


@pytest.mark.parametrize("status", [400, 404, 302])
def test_what_another_attempt_will_not_mend_is_an_error_at_once(pool, server, status):
    async def refuse(request, number):
        return web.Response(status=status, text="no\n such", headers={"location": "/v1/completions"})

    server.behave = refuse
    with pytest.raises(RolloutError, match=f"the frontend answered {status}: no such"):
        pool.run(client_of(pool, server).complete_all([PROMPT], Sampling(4)))
    assert len(server.asked) == 1


def test_an_answer_that_is_cut_is_asked_for_again(pool, server):
    async def cut_first(request, number):
        return web.Response(text='{"id": "cmpl-', content_type="application/json") if number == 1 else None

    server.behave = cut_first
    (completion,) = pool.run(client_of(pool, server).complete_all([PROMPT], Sampling(4)))
    assert (completion.problem, completion.attempt) == (None, 2)


@pytest.mark.parametrize(("cap", "most"), [(None, 200), (7, 7)])
def test_only_the_cap_of_the_recipe_limits_what_is_under_way(pool, server, cap, most):
    async def wait_for_all(request, number):
        deadline = time.monotonic() + 2
        while server.most < most and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    server.behave = wait_for_all
    pool.run(client_of(pool, server, max_inflight=cap).complete_all([PROMPT] * 200, Sampling(4)))
    assert server.most == most


def test_one_batch_after_the_other_goes_over_the_same_connections(pool, server):
    client = client_of(pool, server)
    for _ in range(5):
        pool.run(client.complete_all([PROMPT], Sampling(4)))
    assert len(server.peers) == 1


@pytest.mark.parametrize("announced", [True, False])
def test_an_answer_larger_than_what_was_asked_for_is_not_read_to_its_end(pool, server, announced):
    bound = answer_bound(len(PROMPT), 4, LIMITS.vocab_size, LIMITS.token_bytes)
    sent = []

    async def never_end(request, number):
        response = web.StreamResponse()
        if announced:
            response.content_length = 1 << 40
        await response.prepare(request)
        for _ in range(1 << 16):
            await response.write(b" " * 4096)
            sent.append(4096)
        return response

    server.behave = never_end
    with pytest.raises(RolloutError, match=f"larger than the {bound} bytes"):
        pool.run(client_of(pool, server).complete_all([PROMPT], Sampling(4)))
    assert sum(sent) < 16 << 20, "what the sockets on the way may hold"


def test_the_bound_leaves_room_for_the_longest_answer_there_may_be():
    tokens, text = 50, "\u0000" * 8
    number = -0.123456789012345678e-101
    answer = answer_to(str(uuid.UUID(int=1)), tokens)
    answer["choices"][0]["text"] = text * tokens
    answer["choices"][0]["logprobs"] = {
        "tokens": [text] * tokens,
        "token_logprobs": [number] * tokens,
        "top_logprobs": [[{"token": text, "logprob": number, "bytes": [255] * 8}]] * tokens,
    }
    answer["nvext"]["engine_data"] |= {"completion_token_ids": [99_999] * tokens, "prompt_token_ids": [99_999] * 512}
    answer["nvext"]["engine_data"]["completion_logprobs"] = [number] * tokens
    answer["nvext"]["completion_token_ids"] = [99_999] * tokens
    size = len(json.dumps(answer, separators=(",", ":")))
    bound = answer_bound(512, tokens, 99_999, 8)
    assert size < bound < 2 * size + (16 << 10)


def test_the_first_request_that_fails_ends_the_others(pool, server, journal, tmp_path):
    async def fail_third(request, number):
        if number == 3:
            return web.Response(status=400)
        return await asyncio.sleep(60)

    server.behave = fail_third
    gate = AdmissionGate()
    client = client_of(pool, server, journal, gate)
    with pytest.raises(RolloutError, match="400"):
        pool.run(client.complete_all([PROMPT] * 8, Sampling(4)))
    gate.close_and_drain(0)
    outcomes = {attempt.outcome for attempt in read_attempts(tmp_path / "requests.jsonl")}
    assert outcomes == {"aborted"}


def test_what_cannot_be_recorded_is_not_returned(pool, server):
    journal = RequestJournal(Path("/dev/full"))
    with pytest.raises(RunError, match=r"requests cannot be recorded any more: .*No space left"):
        pool.run(client_of(pool, server, journal).complete_all([PROMPT], Sampling(4)))
    journal.close()

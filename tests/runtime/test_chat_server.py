"""The chat server over real connections: refusals with their field, what the fleet does as HTTP tells it, one answer a
key, the journal. The frontend stands in for Dynamo's here; tests/faults/test_chat.py has the real one."""

import asyncio
import json

import pytest
from aiohttp import web

from functional.runtime.chat.client import ChatClient, ChatPolicy
from functional.runtime.chat.server import ChatServer
from functional.runtime.chat.template import ChatTemplate
from functional.runtime.errors import RunError
from functional.runtime.rollout.client import Limits
from functional.runtime.rollout.completion import Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal, read_attempts
from functional.runtime.rollout.spread import Served
from functional.suite.models import TOOLS_DIR

pytestmark = pytest.mark.unit

LIMITS = Limits(vocab_size=256, max_model_len=64, token_bytes=16)
USER = {"role": "user", "content": "3+4"}
OUTSIDE = {"role": "assistant", "content": "7", "prompt_token_ids": [999], "generation_token_ids": [2]}
PATH = "/v1/chat/completions"


def answer_to(request, body, **changed):
    ids, logprobs = [11, 2], [-0.5, -0.25]
    engine = {
        "prompt_token_ids": body["nvext"]["token_data"],
        "completion_token_ids": ids,
        "completion_logprobs": logprobs,
    }
    nvext = {
        "worker_id": {"decode_worker_id": 42},
        "completion_token_ids": ids,
        "engine_data": engine,
        "timing": {"total_time_ms": 3.0},
    }
    content = [{"token": "7", "logprob": one, "bytes": [55], "top_logprobs": []} for one in logprobs]
    message = {"role": "assistant", "content": "7"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": content}}
    answer_id = f"chatcmpl-{request.headers['x-dynamo-request-id']}"
    return {"id": answer_id, "choices": [choice], "nvext": nvext, "usage": {"total_tokens": 9}} | changed


class Frontend:
    """Answers as `behave(request, body, number)` says, or well; keeps what it was asked."""

    def __init__(self):
        self.behave = None
        self.asked = []

    async def complete(self, request):
        body = await request.json()
        self.asked.append(body)
        found = await self.behave(request, body, len(self.asked)) if self.behave else None
        return found or web.json_response(answer_to(request, body))

    async def start(self):
        app = web.Application()
        app.router.add_post(PATH, self.complete)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"


@pytest.fixture
def pool():
    with HttpPool() as pool:
        yield pool


@pytest.fixture
def frontend(pool):
    frontend = Frontend()
    pool.run(frontend.start())
    yield frontend
    pool.run(frontend.runner.cleanup())


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.load(TOOLS_DIR)


class Chat:
    """A server, and a client of it."""

    def __init__(self, pool, url, template, journal, timeout_s=5.0, waits=False):
        self.pool, self.gate, self.journal = pool, AdmissionGate(waits), journal
        served = Served(url, "policy", LIMITS, timeout_s)
        client = ChatClient(pool, self.gate, served, ChatPolicy(template, Sampling(8)), journal)
        self.server = ChatServer(client, self.gate, "127.0.0.1")
        self.server.start()

    def post(self, body=None, headers=None, **fields):
        return self.pool.run(self.posting(body, headers, **fields))

    async def posting(self, body=None, headers=None, **fields):
        data = json.dumps({"messages": [USER], **fields}) if body is None else body
        async with self.pool.http.post(self.server.url + PATH, data=data, headers=headers) as response:
            return response.status, dict(response.headers), json.loads(await response.read())


@pytest.fixture
def journal(tmp_path):
    journal = RequestJournal(tmp_path / "requests.jsonl")
    yield journal
    journal.close()


@pytest.fixture
def chat(pool, frontend, template, journal):
    chat = Chat(pool, frontend.url, template, journal)
    yield chat
    chat.server.close()


def test_an_answer_has_exact_ids_and_log_probs_and_its_request_is_in_the_journal(chat, frontend, tmp_path):
    status, _, answer = chat.post()
    message = answer["choices"][0]["message"]
    assert status == 200
    assert message["prompt_token_ids"] == frontend.asked[0]["nvext"]["token_data"]
    assert (message["generation_token_ids"], message["generation_log_probs"]) == ([11, 2], [-0.5, -0.25])
    assert (message["content"], answer["usage"], answer["model"]) == ("7", {"total_tokens": 9}, "policy")
    assert answer["choices"][0]["logprobs"] is None
    assert "nvext" not in answer
    (attempt,) = read_attempts(tmp_path / "requests.jsonl")
    assert (attempt.outcome, attempt.purpose, f"chatcmpl-{attempt.request_id}") == ("accepted", "rollout", answer["id"])


def test_the_next_turn_goes_on_from_the_exact_ids(chat, frontend):
    _, _, first = chat.post()
    message = first["choices"][0]["message"]
    chat.post(messages=[USER, message, USER])
    known = message["prompt_token_ids"] + message["generation_token_ids"]
    assert frontend.asked[1]["nvext"]["token_data"][: len(known)] == known


def test_log_probs_and_extra_fields_come_where_they_are_asked_for(chat):
    _, _, answer = chat.post(logprobs=True, nvext={"extra_fields": ["timing", "worker_id"]})
    assert [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]] == [-0.5, -0.25]
    assert answer["nvext"] == {"timing": {"total_time_ms": 3.0}, "worker_id": {"decode_worker_id": 42}}


def test_a_request_at_fault_is_a_400_with_its_field(chat, frontend):
    for fields, field in (
        ({"stream": True}, "stream"),
        ({"model": "gpt"}, "model"),
        ({"messages": [USER | {"content": "7" * 99}]}, "messages"),
        ({"messages": [USER, OUTSIDE]}, "messages"),
        ({"stop_token_ids": [1, 2, 3, 4, 5]}, "stop_token_ids"),
    ):
        status, _, answer = chat.post(**fields)
        assert (status, answer["error"]["param"]) == (400, field)
        assert answer["error"]["message"].startswith(f"{field}: ")
    assert chat.post(body="{")[0] == 400
    assert frontend.asked == []


def test_a_conversation_that_fills_the_context_is_told_as_gym_reads_it(chat):
    status, _, answer = chat.post(messages=[USER | {"content": "x" * 99}])
    assert (status, answer["error"]["type"]) == (400, "context_length_exceeded")
    assert "context length" in answer["error"]["message"]


@pytest.mark.parametrize("waits", [False, True])
def test_while_admission_is_shut_clients_are_told_when_to_ask_again(pool, frontend, template, journal, waits):
    """Also where rollouts wait at the gate."""
    chat = Chat(pool, frontend.url, template, journal, waits=waits)
    chat.gate.shut()
    status, headers, answer = chat.post()
    assert (status, headers["Retry-After"], answer["error"]["type"]) == (503, "1", "admission_shut")
    assert chat.pool.run(health(chat))["admission"] == "shut"
    chat.gate.reopen()
    assert chat.post()[0] == 200
    assert len(frontend.asked) == 1
    chat.server.close()


async def health(chat):
    async with chat.pool.http.get(f"{chat.server.url}/health") as response:
        assert response.status == 200
        return await response.json()


def test_a_request_under_way_holds_the_gate(chat, frontend):
    release = asyncio.Event()

    async def wait(request, body, number):
        await release.wait()

    frontend.behave = wait

    async def drain():
        asking = asyncio.ensure_future(chat.posting())
        while not frontend.asked:
            await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(asyncio.to_thread(chat.gate.close_and_drain, 5))
        await asyncio.sleep(0.1)
        assert not draining.done()
        release.set()
        await draining
        return (await asking)[0]

    assert chat.pool.run(drain()) == 200


@pytest.mark.parametrize(("given", "told"), [(400, 400), (404, 400), (422, 400), (503, 503), (529, 503), (500, 502)])
def test_what_the_fleet_answers_is_told(pool, frontend, template, journal, given, told):
    async def refuse(request, body, number):
        return web.Response(status=given, text="because of this")

    frontend.behave = refuse
    chat = Chat(pool, frontend.url, template, journal, timeout_s=0.3)
    status, _, answer = chat.post()
    assert status == told
    assert "because of this" in answer["error"]["message"]
    assert (len(frontend.asked) > 1) == (given >= 500)
    chat.server.close()


def test_a_fleet_that_is_not_there_or_late(pool, frontend, template, journal):
    async def sleep(request, body, number):
        await asyncio.sleep(5)

    frontend.behave = sleep
    for url, told in (("http://127.0.0.1:9", 502), (frontend.url, 504)):
        chat = Chat(pool, url, template, journal, timeout_s=0.3)
        assert chat.post()[0] == told
        chat.server.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nvext": {}}, "no completion token IDs in the answer"),
        ({"id": "chatcmpl-other"}, "answer is for another request"),
        ({"choices": []}, "choices[0].logprobs does not hold one log-prob per token"),
        ({"choices": "x"}, "the answer is not shaped as Dynamo's are"),
        ({"nvext": "x"}, "the answer is not shaped as Dynamo's are"),
    ],
)
def test_an_answer_that_may_not_be_trained_on_is_not_returned(chat, frontend, tmp_path, change, reason):
    async def spoil(request, body, number):
        return web.json_response(answer_to(request, body, **change))

    frontend.behave = spoil
    status, _, answer = chat.post()
    assert (status, answer["error"]["type"]) == (502, "answer_rejected")
    assert reason in answer["error"]["message"]
    assert [attempt.outcome for attempt in read_attempts(tmp_path / "requests.jsonl")] == ["rejected"]


def test_one_key_is_one_answer_even_where_its_client_was_gone(chat, frontend):
    release = asyncio.Event()

    async def wait(request, body, number):
        await release.wait()

    frontend.behave = wait
    headers = {"Idempotency-Key": "k"}

    async def ask_go_and_ask_again():
        gone = asyncio.ensure_future(chat.posting(headers=headers))
        while not frontend.asked:
            await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        again = [asyncio.ensure_future(chat.posting(headers=headers)) for _ in range(3)]
        await asyncio.sleep(0.1)
        release.set()
        return [*await asyncio.gather(*again), await chat.posting(headers=headers)]

    answers = chat.pool.run(ask_go_and_ask_again())
    assert len(frontend.asked) == 1
    assert {status for status, _, _ in answers} == {200}
    assert len({answer["id"] for _, _, answer in answers}) == 1
    status, _, answer = chat.post(headers=headers, seed=3)
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


async def two_under_way(chat, frontend):
    """One of them under a key. They are not answered."""

    async def wait(request, body, number):
        await asyncio.sleep(30)

    frontend.behave = wait
    asking = [asyncio.ensure_future(chat.posting(headers=headers)) for headers in ({}, {"Idempotency-Key": "k"})]
    while len(frontend.asked) < 2:
        await asyncio.sleep(0.01)
    return asking


def test_what_is_under_way_can_be_given_up(chat, frontend, tmp_path):
    async def ask():
        asking = await two_under_way(chat, frontend)
        await asyncio.to_thread(chat.server.give_up, "every worker was lost")
        return await asyncio.gather(*asking)

    for status, _, answer in chat.pool.run(ask()):
        assert status == 502
        assert answer["error"]["message"] == "given up while under way: every worker was lost"
    chat.gate.close_and_drain(0)
    assert {attempt.outcome for attempt in read_attempts(tmp_path / "requests.jsonl")} == {"aborted"}


def test_a_closed_server_has_nothing_under_way(chat, frontend, tmp_path):
    async def ask():
        asking = await two_under_way(chat, frontend)
        await asyncio.to_thread(chat.server.close)
        left = chat.gate.idle_since()
        attempts = await asyncio.to_thread(written, chat.journal, tmp_path / "requests.jsonl")
        await asyncio.gather(*asking, return_exceptions=True)
        return left, attempts

    left, attempts = chat.pool.run(ask())
    assert left == 2
    assert [attempt.outcome for attempt in attempts] == ["aborted", "aborted"]


def written(journal, path):
    journal.written().result(5)
    return read_attempts(path)


@pytest.mark.parametrize(("is_confirmed", "status"), [(True, 200), (False, 502)])
def test_an_answer_by_a_version_that_is_tried_out_waits_for_what_becomes_of_it(chat, frontend, is_confirmed, status):
    async def ask():
        chat.gate.reopen(3)
        chat.gate.try_out(4)
        asking = asyncio.ensure_future(chat.posting())
        done, _ = await asyncio.wait({asking}, timeout=0.5)
        assert (len(frontend.asked), done) == (1, set())
        if is_confirmed:
            chat.gate.reopen(4)
        else:
            await asyncio.to_thread(chat.server.give_up, "an update failed")
        return await asking

    assert chat.pool.run(ask())[0] == status
    chat.gate.close_and_drain(0)


def test_a_failure_under_a_key_may_be_asked_for_again(chat):
    headers = {"Idempotency-Key": "k"}
    chat.gate.shut()
    assert chat.post(headers=headers)[0] == 503
    chat.gate.reopen()
    assert chat.post(headers=headers)[0] == 200


def test_an_address_in_use_is_one_line(pool, chat, template):
    port = int(chat.server.url.rpartition(":")[2])
    served = Served("http://127.0.0.1:9", "policy", LIMITS, 1.0)
    client = ChatClient(pool, AdmissionGate(), served, ChatPolicy(template, Sampling(8)), None)
    with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1 port {port}"):
        ChatServer(client, AdmissionGate(), "127.0.0.1", port).start()


def test_a_connection_that_ends_within_a_request_harms_nothing(chat, frontend):
    async def send_half():
        host, port = chat.server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()

    chat.pool.run(send_half())
    assert chat.post()[0] == 200
    assert len(frontend.asked) == 1


def test_only_its_own_paths_are_served(chat):
    async def status_of(method, path):
        async with chat.pool.http.request(method, chat.server.url + path) as response:
            return response.status

    assert chat.pool.run(status_of("GET", PATH)) == 405
    assert chat.pool.run(status_of("POST", "/v1/completions")) == 404

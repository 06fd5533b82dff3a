"""Several client processes: each prompt asked for once, in order, each attempt in a journal; and when they are due."""

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest
from aiohttp import web

from functional.runtime.errors import RolloutError
from functional.runtime.rollout import spread as spread_module
from functional.runtime.rollout.client import Limits
from functional.runtime.rollout.completion import Completion, Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal, read_attempts
from functional.runtime.rollout.spread import Served, SpreadClient, processes_wanted
from tests.runtime.test_rollout_http import Server, answer_to

PROMPT = (5, 6, 7)


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
def gate():
    return AdmissionGate()


@pytest.fixture
def spread(pool, server, gate, tmp_path):
    journal = RequestJournal(tmp_path / "requests.jsonl")
    served = Served(server.url, "m", Limits(100, 16, 8), timeout_s=30)
    client = SpreadClient(pool, gate, served, tmp_path, journal, processors=8)
    yield client
    client.close()
    journal.close()


def complete(pool, spread, number, given_up=None):
    return pool.run(spread.complete_each([PROMPT] * number, Sampling(4), given_up or asyncio.Event()))


def test_each_process_takes_a_part_and_every_request_is_in_one_journal(pool, server, gate, spread, tmp_path):
    spread.add_helper()
    spread.add_helper()
    for _ in range(2):
        found = complete(pool, spread, 31)
        assert all(isinstance(one, Completion) and one.problem is None for one in found)
        gate.close_and_drain(0)
        gate.reopen()
    attempts = [read_attempts(tmp_path / name) for name in ("requests.jsonl", "requests-1.jsonl", "requests-2.jsonl")]
    assert [len(one) for one in attempts] == [21, 21, 20]
    assert sorted(one.request_id for part in attempts for one in part) == sorted(server.asked)
    assert len(set(server.asked)) == 62


@pytest.mark.parametrize("is_confirmed", [True, False])
def test_a_helper_s_answers_too_wait_for_the_version_that_is_tried_out(pool, gate, spread, is_confirmed):
    spread.add_helper()
    assert len(complete(pool, spread, 4)) == 4  # it is up
    gate.reopen(3)
    gate.try_out(4)
    given_up = asyncio.Event()

    def decide():
        if is_confirmed:
            gate.reopen(4)
        else:
            pool._loop.call_soon_threadsafe(given_up.set)

    threading.Timer(2.0, decide).start()
    found = complete(pool, spread, 4, given_up)
    if is_confirmed:
        assert {(one.policy_version, one.last_version) for one in found} == {(3, 4)}
    else:
        assert {str(one) for one in found} == {"given up while under way"}
    gate.close_and_drain(0)


class Held:
    """Answers to a request once its prompt, by its last token, is released; keeps which were asked."""

    def __init__(self, server):
        self.asked, self.released, self.server = [], set(), server
        server.behave = self.behave

    async def behave(self, request, number):
        prompt = (await request.json())["prompt"]
        self.asked.append(prompt[-1])
        while prompt[-1] not in self.released:
            await asyncio.sleep(0.01)
        return web.json_response(answer_to(request.headers["x-dynamo-request-id"], prompt=prompt))

    def await_asked(self, *tokens):
        self.await_true(lambda: sorted(self.asked) == sorted(tokens))

    def await_true(self, holds):
        deadline = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline, self.asked
            time.sleep(0.01)


def begin(pool, spread, number):
    """Prompts that end with 0, 1, … : here and in a helper in turn."""
    prompts = [(*PROMPT[:-1], token) for token in range(number)]
    completing = spread.complete_each(prompts, Sampling(4), asyncio.Event())
    return asyncio.run_coroutine_threadsafe(completing, pool._loop)


def versions(batch):
    found = batch.result(30)
    assert [one.problem for one in found] == [None] * len(found)
    return [(one.policy_version, one.last_version) for one in found]


@pytest.fixture
def limited(pool, server, tmp_path):
    """Two under way at a time, one here and one in a helper, by a gate that has rollouts wait."""
    gate = AdmissionGate(waits=True)
    gate.reopen(3)
    served = Served(server.url, "m", Limits(100, 16, 8), timeout_s=30, max_inflight=2)
    client = SpreadClient(pool, gate, served, tmp_path, processors=8)
    client.add_helper()
    yield client, gate
    client.close()


def test_an_update_waits_for_what_a_helper_has_under_way_and_not_for_its_part_of_the_batch(pool, server, limited):
    spread, gate = limited
    held = Held(server)
    batch = begin(pool, spread, 8)
    held.await_asked(0, 1)
    gate.shut()
    held.released = {0, 1}
    gate.close_and_drain(30)
    assert sorted(held.asked) == [0, 1]
    gate.reopen(4)
    held.released = set(range(8))
    assert versions(batch) == [(3, 3)] * 2 + [(4, 4)] * 6
    assert server.most == 2


def test_a_limit_holds_for_all_processes_together(pool, server, limited):
    spread, _ = limited
    spread.add_helper()
    held = Held(server)
    batch = begin(pool, spread, 12)
    held.await_asked(0, 1)
    held.released = set(range(12))
    versions(batch)
    assert server.most == 2


def test_each_answer_of_a_helper_has_the_versions_that_it_met(pool, server, gate, spread):
    """Of an update that does not wait: 0 and 1 are answered before it, 2 and 3 meet it."""
    spread.add_helper()
    gate.reopen(3)
    held = Held(server)
    held.released = {0, 1}
    batch = begin(pool, spread, 4)
    held.await_asked(0, 1, 2, 3)
    held.await_true(lambda: gate._inside == 2)
    gate.shut()
    gate.try_out(4)
    held.released = set(range(4))
    gate.reopen(4)
    assert versions(batch) == [(3, 3), (3, 3), (3, 4), (3, 4)]


def test_a_helper_that_hangs_is_ended_at_the_deadline(pool, server, gate, tmp_path, monkeypatch):
    monkeypatch.setattr(spread_module, "GRACE_S", 0.5)
    served = Served(server.url, "m", Limits(100, 16, 8), timeout_s=20)
    with contextlib.closing(SpreadClient(pool, gate, served, tmp_path, processors=8)) as spread:
        spread.add_helper()
        assert all(isinstance(one, Completion) for one in complete(pool, spread, 2))  # it is up
        helper = spread._helpers[0]
        helper._patience_s = 0.5
        os.kill(helper._process.pid, signal.SIGSTOP)
        found = complete(pool, spread, 4)
    assert (
        sorted(str(one) for one in found if isinstance(one, RolloutError))
        == ["a client process was ended: it did not answer in 0.5 s"] * 2
    )
    gate.close_and_drain(0)


def test_helpers_are_shut_out_by_the_gate_too(pool, server, gate, spread):
    spread.add_helper()
    gate.shut()
    found = complete(pool, spread, 4)
    assert all("admission is shut" in str(one) for one in found)
    assert server.asked == []


def test_given_up_helpers_answer_at_once_and_take_the_next_batch(pool, server, spread):
    async def hang(request, number):
        return await asyncio.sleep(60) if number <= 4 else None

    spread.add_helper()
    server.behave = hang
    given_up = asyncio.Event()
    pool._loop.call_soon_threadsafe(lambda: pool._loop.call_later(1.5, given_up.set))
    began = time.monotonic()
    assert {str(one) for one in complete(pool, spread, 4, given_up)} == {"given up while under way"}
    assert time.monotonic() - began < 20
    assert all(isinstance(one, Completion) for one in complete(pool, spread, 4))


def test_what_is_given_up_before_a_helper_has_begun_it_is_answered(pool, server, spread, monkeypatch):
    """Where the pipe is full, a request and that it is given up come to the helper in one message."""
    all_of, in_one_message = spread_module.all_of, []

    def wait_for_both(queue):
        orders = all_of(queue)
        while not in_one_message and sum(asked is None for _, asked in orders) < 2:
            orders += all_of(queue)
        in_one_message.append(len(orders))
        return orders

    monkeypatch.setattr(spread_module, "all_of", wait_for_both)
    spread.add_helper()

    async def give_up_at_once():
        given_up = asyncio.Event()
        found = asyncio.ensure_future(spread.complete_each([PROMPT] * 4, Sampling(4), given_up))
        for _ in range(2):  # until they are sent
            await asyncio.sleep(0)
        given_up.set()
        return await found

    assert {str(one) for one in pool.run(give_up_at_once())} == {"given up while under way"}
    assert in_one_message == [4]
    monkeypatch.setattr(spread_module, "all_of", all_of)
    assert all(isinstance(one, Completion) for one in complete(pool, spread, 4))


def test_a_helper_that_dies_loses_its_part_alone(pool, server, spread):
    async def kill(request, number):
        os.kill(spread._helpers[0]._process.pid, signal.SIGKILL)
        await asyncio.sleep(0.5)

    spread.add_helper()
    server.behave = kill
    found = complete(pool, spread, 4)
    assert [isinstance(one, RolloutError) for one in found] == [False, True, False, True]
    assert "a client process ended" in str(found[1])


@pytest.mark.parametrize(
    ("busy", "processors", "wanted"),
    [(0.1, 64, 1), (0.7, 64, 1), (0.71, 64, 2), (3.0, 64, 5), (3.0, 4, 3), (3.0, 2, 1), (1.0, 1, 1)],
)
def test_as_many_processes_as_the_load_asks_for(busy, processors, wanted):
    assert processes_wanted(busy, processors) == wanted

"""Several client processes: each prompt asked for once, in order, each attempt in a journal; and when they are due."""

import asyncio
import os
import signal
import threading
import time

import pytest

from functional.runtime.errors import RolloutError
from functional.runtime.rollout.client import Limits
from functional.runtime.rollout.completion import Completion, Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal, read_attempts
from functional.runtime.rollout.spread import Served, SpreadClient, processes_wanted
from tests.runtime.test_rollout_http import Server

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
    assert [len(one) for one in attempts] == [22, 20, 20]
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

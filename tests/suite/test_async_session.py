"""What a failed update does in a run that generates beside training; whole runs are in tests/faults/test_async.py."""

import asyncio
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from functional.runtime.chat.template import ChatTemplate
from functional.runtime.rollout import generation
from functional.runtime.rollout.client import Limits, RolloutClient
from functional.runtime.rollout.completion import Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal, read_attempts
from functional.suite import async_session
from functional.suite.ahead import Ahead
from functional.suite.async_session import AsyncSession
from functional.suite.models import TOOLS_DIR
from tests.runtime.test_chat_server import Chat, Frontend
from tests.runtime.test_rollout_http import PROMPT, Server

PATIENCE_S = 20


def session():
    """Of a run whose updates do not wait, without its parts."""
    made = object.__new__(AsyncSession)
    made._in_flight, made._giving_up, made._times_given_up = True, False, 0
    made._ahead, made._weights = None, threading.RLock()
    made.report = SimpleNamespace(lost_samples=[])
    return made


def test_an_update_that_failed_ends_the_turns_of_chats_too(tmp_path):
    """Engines that go on with other weights within a turn may have met those that were refused."""

    async def never(request, body, number):
        await asyncio.sleep(60)

    async def ask():
        asking = asyncio.ensure_future(chat.posting())
        while not frontend.asked:
            await asyncio.sleep(0.01)
        chat.gate.shut()
        await asyncio.to_thread(run._give_up_rollouts(chat.gate, chat.server))
        return await asking

    run = session()
    with HttpPool() as pool:
        frontend = Frontend()
        frontend.behave = never
        pool.run(frontend.start())
        journal = RequestJournal(tmp_path / "requests.jsonl")
        chat = Chat(pool, frontend.url, ChatTemplate.load(TOOLS_DIR), journal, waits=True)
        began = time.monotonic()
        status, _, answer = pool.run(ask())
        assert (status, answer["error"]["message"]) == (502, "given up while under way: an update failed")
        assert time.monotonic() - began < 20
        assert chat.gate.idle_since() == 1
        assert (run._giving_up, run._times_given_up) == (False, 1)
        chat.server.close()
        pool.run(frontend.runner.cleanup())
        journal.close()
    assert [attempt.outcome for attempt in read_attempts(tmp_path / "requests.jsonl")] == ["aborted"]


class Run:
    """Two samples of a session's batch, with a fleet that loses nobody, and an update beside it."""

    def __init__(self, pool, server):
        self.session, self.gate, self.server = session(), AdmissionGate(waits=True), server
        self.gate.reopen(0)
        worker = SimpleNamespace(index=0, instance_id=42)
        fleet = SimpleNamespace(workers=[worker], lost_workers=dict, check_control_plane=lambda: None)
        refit = SimpleNamespace(version=0, find_lost=dict)
        self.parts = SimpleNamespace(fleet=fleet, refit=refit, sampling=Sampling(4), chat=None)
        self.session._addressees = lambda fleet: ()
        self.client = RolloutClient(pool, server.url, "m", self.gate, Limits(100, 16, 8), timeout_s=PATIENCE_S)
        self.give_up = self.session._give_up_rollouts(self.gate, None)

    def generate(self, number=2):
        return self.session._generate(self.parts, self.client, [PROMPT] * number, 1)

    def await_asked(self, number):
        deadline = time.monotonic() + PATIENCE_S
        while len(self.server.asked) < number:
            assert time.monotonic() < deadline, self.server.asked
            time.sleep(0.01)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(generation, "WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr(generation, "DYING_S", 0)
    with HttpPool() as pool:
        server = Server()
        pool.run(server.start())
        yield Run(pool, server)
        pool.run(server.runner.cleanup())


def begun(action, *arguments):
    """Its result, of a thread that a test which fails leaves alone."""
    result = Future()

    def work():
        try:
            result.set_result(action(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return result


def never_until(number):
    """The first requests, as many, are not answered."""

    async def behave(request, asked):
        if asked <= number:
            await asyncio.sleep(60)

    return behave


def test_updates_that_fail_one_after_the_other_cost_no_sample(run):
    run.server.behave = never_until(6)
    batch = begun(run.generate)
    for failed in (1, 2, 3):
        run.await_asked(2 * failed)
        run.gate.shut()
        run.give_up()
        run.gate.reopen(failed)
    found = batch.result(PATIENCE_S)
    assert [(one.attempt, one.policy_version, one.last_version) for one in found] == [(4, 3, 3)] * 2
    assert [lost.reason for lost in run.session.report.lost_samples] == ["given up while under way"] * 6
    assert run.session._times_given_up == 3


def test_what_begins_while_others_are_given_up_is_not_lost(run):
    """It waits where admission is shut: for weights that are proved."""
    run.server.behave = never_until(1)
    looks = []
    first = begun(run.generate, 1)
    run.await_asked(1)
    run.gate.shut()
    with held(run, looks):
        giving_up = begun(run.give_up)
        while not run.session._giving_up:
            time.sleep(0.01)
        second = begun(run.generate)
        deadline = time.monotonic() + PATIENCE_S
        while len(looks) < 20 and time.monotonic() < deadline:  # of either batch, while the first is being given up
            time.sleep(0.01)
    giving_up.result(PATIENCE_S)
    run.gate.reopen(1)
    assert [one.attempt for one in second.result(PATIENCE_S)] == [1, 1]
    assert [one.attempt for one in first.result(PATIENCE_S)] == [2]
    assert len(run.session.report.lost_samples) == 1


@contextmanager
def held(run, looks):
    """What is under way leaves the gate only at the end."""
    leave, over = run.gate.leave, threading.Event()
    is_given_up = run.session._is_given_up

    def look(*state):
        looks.append(is_given_up(*state))
        return looks[-1]

    def wait_and_leave():
        threading.Thread(target=lambda: (over.wait(PATIENCE_S), leave())).start()

    run.gate.leave, run.session._is_given_up = wait_and_leave, look
    try:
        yield
    finally:
        over.set()
        run.gate.leave, run.session._is_given_up = leave, is_given_up


def test_a_thread_that_waits_for_the_fleet_ends_with_it(monkeypatch):
    """A run that is taken down: a worker that never answers holds up nothing."""
    monkeypatch.setattr(async_session, "PATIENCE_S", 0.2)
    down, told = threading.Event(), []
    run = session()
    run._note_memory = lambda: told.append("memory")

    def shutdown():
        told.append("shutdown")
        down.set()

    run._ahead = Ahead(lambda step: down.wait(PATIENCE_S) and [], lambda: 0, range(1, 2), 1)
    run._ahead.start()
    run._end_ahead(SimpleNamespace(shutdown=shutdown))
    assert told == ["memory", "shutdown"]
    assert not run._ahead._thread.is_alive()


def test_what_waits_outside_while_nothing_is_under_way_is_not_given_up(run):
    run.gate.shut()
    run.give_up()
    assert (run.session._giving_up, run.session._times_given_up) == (False, 0)

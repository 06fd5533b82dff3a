"""What a failed update does in a run that generates beside training; whole runs are in tests/faults/test_async.py."""

import asyncio
import time

from functional.runtime.chat.template import ChatTemplate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal, read_attempts
from functional.suite.async_session import AsyncSession
from functional.suite.models import TOOLS_DIR
from tests.runtime.test_chat_server import Chat, Frontend


def test_an_update_that_failed_ends_the_turns_of_chats_too(tmp_path):
    """Engines that go on with other weights within a turn may have met those that were refused."""
    session = object.__new__(AsyncSession)
    session._in_flight, session._giving_up, session._times_given_up = True, False, 0

    async def never(request, body, number):
        await asyncio.sleep(60)

    async def ask():
        asking = asyncio.ensure_future(chat.posting())
        while not frontend.asked:
            await asyncio.sleep(0.01)
        chat.gate.shut()
        await asyncio.to_thread(session._give_up_rollouts(chat.gate, chat.server))
        return await asking

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
        assert (session._giving_up, session._times_given_up) == (False, 1)
        chat.server.close()
        pool.run(frontend.runner.cleanup())
        journal.close()
    assert [attempt.outcome for attempt in read_attempts(tmp_path / "requests.jsonl")] == ["aborted"]

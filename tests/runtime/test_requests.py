"""The journal of requests, and its join with the workers' logs: each way in which they may not fit has its list."""

import asyncio
import json
import time
import uuid
from pathlib import Path

import pytest

from functional.runtime.errors import RunError
from functional.runtime.rollout.requests import (
    Attempt,
    RequestJournal,
    SharedWrites,
    join,
    read_attempts,
    received_requests,
)

FIRST, SECOND, THIRD = (str(uuid.UUID(int=number)) for number in (1, 2, 3))


def attempt(request_id, outcome="accepted", sample="s1"):
    return Attempt(request_id, sample, "rollout", 1, outcome, None, 1.0, 2.0)


def line(request_id, endpoint="generate"):
    return f'\x1b[2mINFO\x1b[0m request received request_id={request_id} worker=7 endpoint="{endpoint}"\n'


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "worker-0.log"

    def write(*request_ids):
        path.write_text("starting\n" + "".join(map(line, request_ids)))
        return [path]

    return write


def test_the_journal_has_every_attempt_in_its_file_once_it_says_so(tmp_path):
    journal = RequestJournal(tmp_path / "requests.jsonl")
    journal.add(attempt(FIRST))
    journal.add(attempt(SECOND, "retried"))
    journal.written().result(10)
    kept = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [(one["request_id"], one["outcome"]) for one in kept] == [(FIRST, "accepted"), (SECOND, "retried")]
    assert read_attempts(tmp_path / "requests.jsonl") == [attempt(FIRST), attempt(SECOND, "retried")]
    journal.close()


def test_requests_that_were_answered_and_logged_once_are_one_to_one(log):
    found = join(
        [attempt(FIRST), attempt(SECOND, "retried", "s2"), attempt(THIRD, "rejected", "s2")], log(FIRST, THIRD)
    )
    assert found.is_one_to_one
    assert (found.sent, found.logged) == ({"accepted": 1, "retried": 1, "rejected": 1}, 2)


@pytest.mark.parametrize(
    ("attempts", "logged", "where", "what"),
    [
        ([attempt(FIRST)], [FIRST, SECOND], "unknown", SECOND),
        ([attempt(FIRST)], [], "unserved", FIRST),
        ([attempt(FIRST)], [FIRST, FIRST], "served_twice", FIRST),
        ([attempt(FIRST), attempt(SECOND)], [FIRST, SECOND], "answered_twice", "s1"),
    ],
)
def test_what_does_not_fit_is_named(log, attempts, logged, where, what):
    found = join(attempts, log(*logged))
    assert not found.is_one_to_one
    assert {
        name: ids for name in ("unknown", "unserved", "served_twice", "answered_twice") if (ids := vars(found)[name])
    } == {where: [what]}


def test_only_generate_requests_count(tmp_path):
    log = tmp_path / "worker-0.log"
    log.write_text(line(FIRST) + line(SECOND, "rl") + line(THIRD))
    assert received_requests(log) == [FIRST, THIRD]


def test_many_that_wait_for_the_journal_share_its_writes(tmp_path):
    journal = RequestJournal(tmp_path / "requests.jsonl")
    marks = []
    written = journal.written
    journal.written = lambda: marks.append(1) or written()

    async def wait_all():
        writes = SharedWrites(journal)

        async def add(number):
            await asyncio.sleep(number % 3 / 1000)
            journal.add(attempt(f"{number:036}"))
            await writes.written()
            in_file = (tmp_path / "requests.jsonl").read_text()
            assert f"{number:036}" in in_file, "returned before its attempt was in the file"

        given_up = asyncio.ensure_future(writes.written())
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(*map(add, range(200)))

    asyncio.run(wait_all())
    journal.close()
    assert len(marks) < 100


def test_all_that_wait_hear_that_nothing_can_be_recorded_any_more():
    journal = RequestJournal(Path("/dev/full"))

    async def wait_all():
        writes = SharedWrites(journal)
        journal.add(attempt("0" * 36))
        return await asyncio.gather(*(writes.written() for _ in range(3)), return_exceptions=True)

    failures = asyncio.run(wait_all())
    assert [type(failure) for failure in failures] == [RunError] * 3
    journal.close()


def test_who_is_cancelled_while_the_journal_writes_stops_nobody_else(tmp_path):
    """Neither its thread, nor those that wait later; and what was added is in the file."""
    journal = RequestJournal(tmp_path / "requests.jsonl")
    write = journal._write

    def write_slowly():
        time.sleep(0.2)
        write()

    journal._write = write_slowly

    async def wait_all():
        writes = SharedWrites(journal)
        journal.add(attempt("0" * 36))
        alone = asyncio.wrap_future(journal.written())
        await asyncio.sleep(0.1)
        alone.cancel()
        shared = asyncio.ensure_future(writes.written())
        await asyncio.sleep(0.1)
        assert writes._writing is not None
        writes._writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(shared, 10)
        await asyncio.wait_for(writes.written(), 10)

    asyncio.run(wait_all())
    journal.close()
    assert [one.request_id for one in read_attempts(tmp_path / "requests.jsonl")] == ["0" * 36]

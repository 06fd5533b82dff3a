"""One request to the frontend until it is answered: the attempts, their identity, deadline, backoff and journal.

`x-dynamo-request-id` (a UUID) sets a request's ID; the answer's `id` is `cmpl-<uuid>` or `chatcmpl-<uuid>`.
"""

import asyncio
import itertools
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import aiohttp
from yarl import URL

from functional.runtime.errors import RolloutError, UnansweredError
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import Attempt, Outcome, RequestJournal

RETRIED_STATUS = frozenset({408, 429, *range(500, 600)})
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 4.0
QUOTED_BYTES = 4096
"""How much of an answer that is an error is read."""


@dataclass(frozen=True)
class Sent:
    """An attempt under way; the fields are those of `Attempt`."""

    request_id: str
    sample: str
    purpose: str
    number: int
    at: float


class Answered(Protocol):
    """What is read of an answer. problem: the first rule that it breaks."""

    @property
    def problem(self) -> str | None: ...


Read = TypeVar("Read", bound=Answered)


class Sender:
    """Sends to one address of the frontend, over the pool's connections and on its loop."""

    def __init__(self, pool: HttpPool, url: str, timeout_s: float, journal: RequestJournal | None) -> None:
        """`timeout_s` bounds one request with all its attempts; `journal` hears of every attempt."""
        self._pool = pool
        self._url = URL(url, encoded=True)
        self._timeout_s = timeout_s
        self._journal = journal

    async def answer(self, body: bytes, bound: int, read: Callable[[bytes, Sent], Read], purpose: str) -> Read:
        """Send until answered: 408, 429, 5xx and transport errors are tried again, with backoff, until the deadline.

        bound: bytes that an answer may have; read: makes something of it, or raises ValueError where it was cut.
        Raises UnansweredError, and RolloutError for an answer that is too large.
        """
        sample = str(uuid.uuid4())
        deadline = time.monotonic() + self._timeout_s
        for number in itertools.count(1):
            sent = Sent(str(uuid.uuid4()), sample, purpose, number, time.time())
            try:
                answer = _read(await self._post(body, sent.request_id, deadline, bound), sent, read)
            except _TryAgainError as again:
                pause = min(FIRST_BACKOFF_S * 2 ** (number - 1), LAST_BACKOFF_S) * random.uniform(0.5, 1.0)
                if time.monotonic() + pause >= deadline:
                    self._note(sent, "aborted", str(again))
                    given_up = f"given up after {number} attempts in {self._timeout_s:g} s"
                    text = f"request {sent.request_id}: {again}; {given_up}"
                    raise UnansweredError(text, again.status, again.is_late) from again
                self._note(sent, "retried", str(again))
                await asyncio.sleep(pause)
            except (RolloutError, asyncio.CancelledError) as end:
                self._note(sent, "aborted", str(end) or "cancelled")
                raise
            else:
                self._note(sent, "rejected" if answer.problem else "accepted", answer.problem)
                return answer
        raise AssertionError("attempts are counted without end")

    def _note(self, sent: Sent, outcome: Outcome, reason: str | None) -> None:
        if self._journal is not None:
            self._journal.add(
                Attempt(sent.request_id, sent.sample, sent.purpose, sent.number, outcome, reason, sent.at, time.time())
            )

    async def _post(self, body: bytes, request_id: str, deadline: float, bound: int) -> bytes:
        """One attempt. Raises _TryAgainError for what another attempt may mend, RolloutError for what it will not."""
        left = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
        headers = {"x-dynamo-request-id": request_id}
        try:
            async with self._pool.http.post(
                self._url, data=body, headers=headers, timeout=left, allow_redirects=False
            ) as response:
                if response.status == 200:
                    return await _read_bounded(response, bound, request_id)
                quoted = await response.content.read(QUOTED_BYTES)
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            raise _TryAgainError(text, is_late=isinstance(error, TimeoutError)) from error
        words = " ".join(quoted.decode(errors="replace").split())
        text = f"the frontend answered {response.status}: {words[:300]}"
        if response.status in RETRIED_STATUS:
            raise _TryAgainError(text, response.status)
        raise UnansweredError(f"request {request_id}: {text}", response.status)


async def _read_bounded(response: aiohttp.ClientResponse, bound: int, request_id: str) -> bytes:
    """The answer's body. Raises RolloutError as soon as it is larger than `bound` bytes."""
    parts, size = [], response.content_length or 0
    if size <= bound:
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > bound:
                break
            parts.append(part)
    if size > bound:
        response.close()
        raise RolloutError(f"request {request_id}: the answer is larger than the {bound} bytes that were asked for")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read(body: bytes, sent: Sent, read: Callable[[bytes, Sent], Read]) -> Read:
    """Raises _TryAgainError for an answer that was cut."""
    try:
        return read(body, sent)
    except ValueError as error:
        raise _TryAgainError(str(error)) from error


class _TryAgainError(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, text: str, status: int | None = None, is_late: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.is_late = is_late

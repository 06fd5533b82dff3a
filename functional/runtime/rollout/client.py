"""Token-ID completions through the Dynamo frontend, each validated, each attempt journalled.

`x-dynamo-request-id` (a UUID) sets a request's ID; the answer's `id` is `cmpl-<uuid>`.
"""

import asyncio
import contextlib
import itertools
import random
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

import aiohttp
import msgspec
from yarl import URL

from functional.runtime.errors import RolloutError
from functional.runtime.rollout.completion import Completion, Sampling, answer_bound, read_completion, request_body
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import Attempt, Outcome, RequestJournal

RETRIED_STATUS = frozenset({408, 429, *range(500, 600)})
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 4.0
QUOTED_BYTES = 4096
"""How much of an answer that is an error is read."""


@dataclass(frozen=True)
class Limits:
    """Of the served model: what a request may ask for, and how large its answer may be.

    vocab_size: token IDs lie below; max_model_len: tokens of prompt and answer together; token_bytes: of the longest
    token's text, in UTF-8.
    """

    vocab_size: int
    max_model_len: int
    token_bytes: int


class RolloutClient:
    """Sends token-ID prompts to the frontend.

    Its methods are coroutines for the pool's loop: `client.pool.run(client.complete_all(…))`. What they return, and
    each attempt that led there, is in the journal.
    """

    def __init__(
        self,
        pool: HttpPool,
        url: str,
        model: str,
        gate: AdmissionGate,
        limits: Limits,
        timeout_s: float,
        journal: RequestJournal | None = None,
        max_inflight: int | None = None,
    ) -> None:
        """model: the name it is served by; `timeout_s` bounds one completion with all its attempts; `journal` hears of
        every attempt; max_inflight: rollouts under way at a time, None for all of them."""
        self.pool = pool
        self._url = URL(f"{url}/v1/completions", encoded=True)
        self._model = model
        self._gate = gate
        self.limits = limits
        self._timeout_s = timeout_s
        self._journal = journal
        self._sendable: tuple[int, ...] | None = None
        self._turns = itertools.count()
        self._inflight: contextlib.AbstractAsyncContextManager[object] = (
            contextlib.nullcontext() if max_inflight is None else asyncio.Semaphore(max_inflight)
        )

    async def complete_all(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion per prompt, in order. Raises RolloutError on the first request that cannot be answered."""
        return await self._together([self._rollout(prompt, sampling) for prompt in prompts])

    async def complete_each(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, given_up: asyncio.Event
    ) -> list[Completion | RolloutError]:
        """As `complete_all`, but a request that cannot be answered gives its error in its place, and ends no other.

        Once `given_up` is set, what is still under way is lost.
        """
        tasks = [asyncio.ensure_future(self._rollout(prompt, sampling)) for prompt in prompts]
        giving_up = asyncio.ensure_future(_cancel_at(given_up, tasks))
        try:
            outcomes = await self._settled(tasks)
        finally:
            giving_up.cancel()
        return [outcome(one) for one in outcomes]

    async def complete_on(
        self, instance_id: int, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[Completion]:
        """One completion per prompt, in order, by the named worker, past the gate: for probes while rollouts are shut
        out. The prompts are sent together."""
        return await self._together([self._complete(prompt, sampling, instance_id, "probe") for prompt in prompts])

    async def _together(self, completions: Sequence[Awaitable[Completion]]) -> list[Completion]:
        """All of them; the first that fails ends the others."""
        tasks = [asyncio.ensure_future(completion) for completion in completions]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await self._settled(tasks)

    async def _settled(self, tasks: Sequence["asyncio.Future[Completion]"]) -> list[Completion | BaseException]:
        """What became of each, once every attempt of theirs is in the journal's file. Cancelled, it cancels them."""
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        if self._journal is not None:
            await asyncio.wrap_future(self._journal.written())
        return outcomes

    async def _rollout(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        async with self._inflight:
            self._gate.enter()
            try:
                named = sampling.instances and sampling.instances[next(self._turns) % len(sampling.instances)]
                return await self._complete(prompt, sampling, named or None, "rollout")
            finally:
                self._gate.leave()

    async def _complete(
        self, prompt: Sequence[int], sampling: Sampling, instance_id: int | None, purpose: str
    ) -> Completion:
        """Send until answered: 408, 429, 5xx and transport errors are tried again, with backoff, until the deadline."""
        prompt = tuple(prompt)
        if prompt is not self._sendable:  # the samples of a group share theirs
            self._refuse_unsendable(prompt)
            self._sendable = prompt
        left = self.limits.max_model_len - len(prompt)
        if sampling.max_tokens > left:
            sampling = replace(sampling, max_tokens=left)
        body = msgspec.json.encode(request_body(self._model, prompt, sampling, instance_id))
        bound = answer_bound(len(prompt), sampling.max_tokens, self.limits.vocab_size, self.limits.token_bytes)
        sample = str(uuid.uuid4())
        deadline = time.monotonic() + self._timeout_s
        for number in itertools.count(1):
            sent = _Sent(str(uuid.uuid4()), sample, purpose, number, time.time())
            try:
                answer = await self._post(body, sent.request_id, deadline, bound)
                completion = _read(answer, sent, prompt, sampling)
            except _TryAgainError as again:
                pause = min(FIRST_BACKOFF_S * 2 ** (number - 1), LAST_BACKOFF_S) * random.uniform(0.5, 1.0)
                if time.monotonic() + pause >= deadline:
                    self._note(sent, "aborted", str(again))
                    raise RolloutError(
                        f"request {sent.request_id}: {again}; given up after {number} attempts in {self._timeout_s:g} s"
                    ) from again
                self._note(sent, "retried", str(again))
                await asyncio.sleep(pause)
            except (RolloutError, asyncio.CancelledError) as end:
                self._note(sent, "aborted", str(end) or "cancelled")
                raise
            else:
                self._note(sent, "rejected" if completion.problem else "accepted", completion.problem)
                return completion
        raise AssertionError("attempts are counted without end")

    def _note(self, sent: "_Sent", outcome: Outcome, reason: str | None) -> None:
        if self._journal is not None:
            self._journal.add(
                Attempt(sent.request_id, sent.sample, sent.purpose, sent.number, outcome, reason, sent.at, time.time())
            )

    async def _post(self, body: bytes, request_id: str, deadline: float, bound: int) -> bytes:
        """One attempt. Raises _TryAgainError for what another attempt may mend, RolloutError for what it will not."""
        left = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
        headers = {"x-dynamo-request-id": request_id}
        try:
            async with self.pool.http.post(
                self._url, data=body, headers=headers, timeout=left, allow_redirects=False
            ) as response:
                if response.status == 200:
                    return await _read_bounded(response, bound, request_id)
                quoted = await response.content.read(QUOTED_BYTES)
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            raise _TryAgainError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        words = " ".join(quoted.decode(errors="replace").split())
        text = f"the frontend answered {response.status}: {words[:300]}"
        if response.status in RETRIED_STATUS:
            raise _TryAgainError(text)
        raise RolloutError(f"request {request_id}: {text}")

    def _refuse_unsendable(self, prompt: tuple[int, ...]) -> None:
        """Refuse what Dynamo would answer with an error, or complete otherwise than asked."""
        if not prompt:
            raise RolloutError("prompt is empty: nothing to complete")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < self.limits.vocab_size:
                raise RolloutError(f"prompt holds token ID {token}, outside the vocabulary of {self.limits.vocab_size}")
        if len(prompt) >= self.limits.max_model_len:
            raise RolloutError(
                f"prompt of {len(prompt)} tokens leaves no room for an answer in the context of "
                f"{self.limits.max_model_len} (policy.generation.vllm_cfg.max_model_len)"
            )


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


def _read(answer: bytes, sent: "_Sent", prompt: tuple[int, ...], sampling: Sampling) -> Completion:
    """The answer as a completion. Raises _TryAgainError for one that was cut."""
    try:
        return read_completion(answer, sent.request_id, prompt, sampling, sent.at, sent.number)
    except ValueError as error:
        raise _TryAgainError(str(error)) from error


async def _cancel_at(given_up: asyncio.Event, tasks: Sequence["asyncio.Future[Completion]"]) -> None:
    await given_up.wait()
    for task in tasks:
        task.cancel()


def outcome(found: Completion | BaseException) -> Completion | RolloutError:
    """A completion, or why there is none; raises what is no failure of a request."""
    if isinstance(found, asyncio.CancelledError):
        return RolloutError("given up while under way")
    if isinstance(found, Completion | RolloutError):
        return found
    raise found


@dataclass(frozen=True)
class _Sent:
    """An attempt under way."""

    request_id: str
    sample: str
    purpose: str
    number: int
    at: float


class _TryAgainError(Exception):
    """An attempt failed in a way that another may not."""

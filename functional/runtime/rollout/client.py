"""Token-ID completions through the Dynamo frontend, each validated, each attempt journalled."""

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from functional.runtime.errors import RolloutError
from functional.runtime.rollout.completion import Completion, Sampling, answer_bound, read_completion, request_body
from functional.runtime.rollout.gate import Admission, AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal
from functional.runtime.rollout.sending import Sender, Sent


@dataclass(frozen=True)
class Limits:
    """Of the served model: what a request may ask for, and how large its answer may be.

    vocab_size: token IDs lie below; max_model_len: tokens of prompt and answer together; token_bytes: of the longest
    token's text, in UTF-8.
    """

    vocab_size: int
    max_model_len: int
    token_bytes: int

    def refuse_unsendable(self, prompt: tuple[int, ...]) -> None:
        """Refuse what Dynamo would answer with an error, or complete otherwise than asked: raises RolloutError."""
        if not prompt:
            raise RolloutError("prompt is empty: nothing to complete")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < self.vocab_size:
                raise RolloutError(f"prompt holds token ID {token}, outside the vocabulary of {self.vocab_size}")
        if len(prompt) >= self.max_model_len:
            raise RolloutError(
                f"prompt of {len(prompt)} tokens leaves no room for an answer in the context of "
                f"{self.max_model_len} (policy.generation.vllm_cfg.max_model_len)"
            )


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
        self._sender = Sender(pool, f"{url}/v1/completions", timeout_s, journal)
        self._model = model
        self._gate = gate
        self._admission = Admission(gate, max_inflight)
        self.limits = limits
        self._journal = journal
        self._sendable: tuple[int, ...] | None = None
        self._turns = itertools.count()

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
        giving_up = asyncio.ensure_future(cancel_at(given_up, tasks))
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
        return await self._together([self.send(prompt, sampling, instance_id, "probe") for prompt in prompts])

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
        async with self._admission as version:
            named = sampling.instances and sampling.instances[next(self._turns) % len(sampling.instances)]
            completion = await self.send(prompt, sampling, named or None, "rollout")
            await self._gate.confirmed()
            return replace(completion, policy_version=version, last_version=self._gate.newest)

    async def send(
        self, prompt: Sequence[int], sampling: Sampling, instance_id: int | None, purpose: str
    ) -> Completion:
        """One completion, past the gate and the limit: for whoever has passed both. Raises RolloutError."""
        prompt = tuple(prompt)
        if prompt is not self._sendable:  # the samples of a group share theirs
            self.limits.refuse_unsendable(prompt)
            self._sendable = prompt
        left = self.limits.max_model_len - len(prompt)
        if sampling.max_tokens > left:
            sampling = replace(sampling, max_tokens=left)
        body = msgspec.json.encode(request_body(self._model, prompt, sampling, instance_id))
        limits = self.limits
        bound = answer_bound(
            len(prompt), sampling.max_tokens, limits.vocab_size, limits.token_bytes, sampling.prompt_logprobs
        )

        def read(answer: bytes, sent: Sent) -> Completion:
            return read_completion(answer, sent.request_id, prompt, sampling, sent.at, sent.number)

        return await self._sender.answer(body, bound, read, purpose)


Found = TypeVar("Found")


async def cancel_at(given_up: asyncio.Event, tasks: Sequence["asyncio.Future[Any]"]) -> None:
    """Cancel them once it is set."""
    await given_up.wait()
    for task in tasks:
        task.cancel()


def outcome(found: Found | BaseException) -> Found | RolloutError:
    """What was found, or why nothing was; raises what is no failure of a request."""
    if isinstance(found, asyncio.CancelledError):
        return RolloutError("given up while under way")
    if isinstance(found, BaseException) and not isinstance(found, RolloutError):
        raise found
    return found

"""Turns of conversations, asked of the fleet by the rules of rollouts: gate, limit, attempts, journal, checks."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from functional.runtime.chat.exchange import ChatCompletion, chat_answer_bound, chat_body, read_chat
from functional.runtime.chat.request import MAX_STOP_TOKEN_IDS, ChatError, ChatRequest, read_request
from functional.runtime.chat.template import ChatTemplate
from functional.runtime.errors import RolloutError
from functional.runtime.rollout.completion import Asked, Sampling
from functional.runtime.rollout.gate import Admission, AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal, SharedWrites
from functional.runtime.rollout.sending import Sender, Sent
from functional.runtime.rollout.spread import Served


@dataclass(frozen=True)
class ChatPolicy:
    """How a policy chats. sampling: what a request may not change, and the `max_tokens` of one that says nothing;
    exclude_tools: under `tool_choice: none` no tool is rendered."""

    template: ChatTemplate
    sampling: Sampling
    exclude_tools: bool = True


class ContextFullError(ChatError):
    """The conversation leaves no room for an answer."""


class ChatClient:
    """`complete` is a coroutine for the pool's loop."""

    def __init__(
        self, pool: HttpPool, gate: AdmissionGate, served: Served, policy: ChatPolicy, journal: RequestJournal | None
    ) -> None:
        self.pool = pool
        self.served = served
        self._policy = policy
        self._writes = None if journal is None else SharedWrites(journal)
        self._gate = gate
        self._admission = Admission(gate, served.max_inflight, waits=False)  # whose client asks again
        self._turns: set[asyncio.Task[ChatCompletion]] = set()
        self._reason = ""
        self._sender = Sender(pool, f"{served.url}/v1/chat/completions", served.timeout_s, journal)

    async def complete(self, body: bytes) -> ChatCompletion:
        """The answer to a client's request, once every attempt for it is in the journal's file.

        Raises ChatError for what may not be sent, AdmissionShutError, and what `Sender.answer` raises.
        """
        request = read_request(body, self._policy.sampling.temperature, self._policy.exclude_tools)
        prompt = self._prompt(request)
        sampling = self._sampling(request, len(prompt))
        limits, model = self.served.limits, self.served.model
        alternatives = request.sent.get("top_logprobs") or 0
        bound = chat_answer_bound(len(prompt), sampling.max_tokens, limits.vocab_size, limits.token_bytes, alternatives)

        def read(answer: bytes, sent: Sent) -> ChatCompletion:
            answer_id = f"chatcmpl-{sent.request_id}"
            asked = Asked(answer_id, sent.request_id, prompt, sampling.max_tokens, sent.at, sent.number)
            return read_chat(answer, asked, model, request)

        sending = chat_body(request, model, prompt, sampling)
        try:
            async with self._admission:
                return await self._under_way(self._answer(sending, bound, read))
        finally:
            if self._writes is not None:
                await self._writes.written()

    def give_up(self, reason: str) -> None:
        """End what is under way, each with a RolloutError, and wait for that: for a fleet that will not answer any
        more."""
        self.pool.run(self._give_up(reason))

    async def _give_up(self, reason: str) -> None:
        self._reason = reason
        turns = list(self._turns)
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)

    async def _answer(self, body: bytes, bound: int, read: Callable[[bytes, Sent], ChatCompletion]) -> ChatCompletion:
        completion = await self._sender.answer(body, bound, read, "rollout")
        await self._gate.confirmed()
        return completion

    async def _under_way(self, answer: Coroutine[Any, Any, ChatCompletion]) -> ChatCompletion:
        turn = asyncio.ensure_future(answer)
        self._turns.add(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RolloutError(f"given up while under way: {self._reason}") from None
        finally:
            self._turns.discard(turn)

    def _prompt(self, request: ChatRequest) -> tuple[int, ...]:
        limits = self.served.limits
        if request.model not in (None, self.served.model):
            raise ChatError("model", f"the policy is served as {self.served.model!r}, not {request.model!r}")
        prompt = self._policy.template.prompt(request)
        if len(prompt) >= limits.max_model_len:
            message = f"the prompt has {len(prompt)} tokens, and the model's context length is {limits.max_model_len}"
            raise ContextFullError("messages", message)
        for token in (min(request.prefix, default=0), max(request.prefix, default=0)):
            if not 0 <= token < limits.vocab_size:
                raise ChatError("messages", f"token ID {token} is outside the vocabulary of {limits.vocab_size}")
        return prompt

    def _sampling(self, request: ChatRequest, prompt_tokens: int) -> Sampling:
        policy = self._policy.sampling
        wanted = policy.max_tokens if request.max_tokens is None else request.max_tokens
        stops = tuple(dict.fromkeys((*policy.stop_token_ids, *request.stop_token_ids)))
        if len(stops) > MAX_STOP_TOKEN_IDS:
            message = f"{len(stops)} with the policy's own, and Dynamo takes {MAX_STOP_TOKEN_IDS}"
            raise ChatError("stop_token_ids", message)
        return Sampling(
            min(wanted, self.served.limits.max_model_len - prompt_tokens), policy.temperature, stop_token_ids=stops
        )

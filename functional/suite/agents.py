"""Agents that answer `3+4-5` through the chat server, with a tool for each sum: conversations, and their worth."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from functional.runtime.chat.request import ID_FIELDS, ChatRequest, read_request
from functional.runtime.chat.server import ANSWER_REJECTED, CONTEXT_FULL, IDEMPOTENCY_KEY
from functional.runtime.chat.template import ChatTemplate
from functional.runtime.errors import RolloutError
from functional.runtime.rollout.client import cancel_at, outcome
from functional.runtime.rollout.completion import Completion, Sampling
from functional.runtime.rollout.pool import HttpPool
from functional.suite.tasks import Prompt, step_random
from functional.suite.tool_questions import TOOLS, ToolQuestion, tool_questions, use_tool

MAX_TURNS = 4
"""One more than a right answer takes."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 2.0


@dataclass(frozen=True)
class Conversation:
    """An agent's answer to a question. said: its last words; turns: what was generated, in order; calls: tools used;
    fault: why a further turn may not be trained on."""

    question: ToolQuestion
    turns: tuple[Completion, ...]
    said: str
    calls: int
    attempt: int = 1
    fault: str | None = None

    @property
    def problem(self) -> str | None:
        """The first rule that one of its turns breaks; beside those of completions, each goes on from the exact IDs
        before it."""
        if self.fault is not None:
            return self.fault
        for before, turn in zip(self.turns, self.turns[1:], strict=False):
            known = before.prompt_token_ids + before.token_ids
            if turn.prompt_token_ids[: len(known)] != known:
                return f"{turn.request_id}: its prompt does not begin with the turn before it"
        return None

    @property
    def reward(self) -> float:
        """1 for the right answer, else 0."""
        return float(self.said.strip() == str(self.question.answer))


class ToolTask:
    """Questions for agents, as `tasks.Task` has them for prompts."""

    def __init__(self, template: ChatTemplate, num_prompts: int, seed: int) -> None:
        self._template = template
        self._questions = tool_questions()
        self._num_prompts = num_prompts
        self._seed = seed

    def questions(self, step: int) -> list[ToolQuestion]:
        """The step's, distinct, the same for the same seed and step."""
        return step_random(self._seed, step).sample(self._questions, self._num_prompts)

    def prompts(self, step: int) -> list[Prompt]:
        """Of the first turns."""
        return [
            Prompt(q.text, self._template.prompt(first_request(q.text)), str(q.answer)) for q in self.questions(step)
        ]

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> float:
        raise NotImplementedError("conversations are rewarded as a whole")


def first_request(text: str) -> ChatRequest:
    """The first turn's request, as the chat server reads it."""
    return read_request(msgspec.json.encode({"messages": opening(text), "tools": TOOLS}), 1.0)


def opening(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


class TurnError(RolloutError):
    """The chat server refused a turn. kind: its error's type."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class AgentClient:
    """Has conversations through a chat server; several at once, on the pool's loop."""

    def __init__(self, pool: HttpPool, url: str, model: str, timeout_s: float) -> None:
        """timeout_s: of one turn, with all attempts that the server and the agent make."""
        self.pool = pool
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._timeout_s = timeout_s

    async def complete_each(
        self, questions: Sequence[ToolQuestion], sampling: Sampling, given_up: asyncio.Event
    ) -> list[Conversation | RolloutError]:
        """As `RolloutClient.complete_each`, a conversation a question."""
        tasks = [asyncio.ensure_future(self._converse(question, sampling)) for question in questions]
        giving_up = asyncio.ensure_future(cancel_at(given_up, tasks))
        try:
            found = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            giving_up.cancel()
        return [outcome(one) for one in found]

    async def _converse(self, question: ToolQuestion, sampling: Sampling) -> Conversation:
        """Until an answer without a call, or with one that is none, or a full context, or the last turn."""
        messages = opening(question.text)
        turns: list[Completion] = []
        calls = 0
        message: dict[str, Any] = {}
        while len(turns) < MAX_TURNS:
            try:
                turn, message = await self.turn(messages, sampling)
            except TurnError as refused:
                if refused.kind == ANSWER_REJECTED:
                    return Conversation(question, tuple(turns), "", calls, fault=str(refused))
                if refused.kind == CONTEXT_FULL and turns:
                    break
                raise
            turns.append(turn)
            asked = message.get("tool_calls") or []
            results = [use_tool(call["function"]["name"], call["function"]["arguments"]) for call in asked]
            if not asked or None in results:
                break
            calls += len(asked)
            messages = [*messages, message, *map(tool_message, asked, results)]
        said = "" if message.get("tool_calls") else message.get("content") or ""
        return Conversation(question, tuple(turns), said, calls)

    async def turn(self, messages: list[dict[str, Any]], sampling: Sampling) -> tuple[Completion, dict[str, Any]]:
        body = {
            "model": self._model,
            "messages": messages,
            "tools": TOOLS,
            "max_completion_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "nvext": {"extra_fields": ["worker_id"]},
        }
        began = time.time()
        answer = json.loads(await self._post(msgspec.json.encode(body)))
        (choice,) = answer["choices"]
        message = choice["message"]
        prompt, ids, logprobs = (tuple(message[name]) for name in ID_FIELDS)
        completion = Completion(
            request_id=answer["id"].removeprefix("chatcmpl-"),
            prompt_token_ids=prompt,
            token_ids=ids,
            logprobs=logprobs,
            instance_id=answer["nvext"]["worker_id"]["decode_worker_id"],
            cached_tokens=0,
            kv_hit_rate=None,
            sent_at=began,
            answered_at=time.time(),
            problem=None,
            max_tokens=sampling.max_tokens,
            truncated=choice["finish_reason"] == "length",
        )
        return completion, message

    async def _post(self, body: bytes) -> bytes:
        """The answer's body. Under one key, so that a connection that breaks behind the answer costs no other turn."""
        headers = {IDEMPOTENCY_KEY: str(uuid.uuid4())}
        deadline = time.monotonic() + self._timeout_s
        backoff = FIRST_BACKOFF_S
        while True:
            left = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
            pause = backoff * random.uniform(0.5, 1.0)
            try:
                async with self.pool.http.post(self._url, data=body, headers=headers, timeout=left) as response:
                    answer: bytes = await response.read()
                    if response.status == 200:
                        return answer
                reason = f"the chat server answered {response.status}: {answer[:300].decode(errors='replace')}"
                if response.status != 503:
                    raise TurnError(reason, json.loads(answer)["error"]["type"])
                pause = float(response.headers.get("Retry-After", pause))
            except (aiohttp.ClientError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause >= deadline:
                raise RolloutError(f"a turn was not answered in {self._timeout_s:g} s: {reason}")
            await asyncio.sleep(pause)
            backoff = min(2 * backoff, LAST_BACKOFF_S)


def tool_message(call: dict[str, Any], result: str | None) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": result}

"""Token-ID completions through the Dynamo frontend, each validated.

Request and answer follow Dynamo 1.3.0.post1: `POST /v1/completions` with token IDs, `nvext.extra_fields`, and the
answer's `nvext.engine_data`. `x-dynamo-request-id` (a UUID) sets the request's ID; the answer's `id` is `cmpl-<uuid>`.
"""

import asyncio
import itertools
import math
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from functional.runtime.errors import RolloutError
from functional.runtime.recipe.argv import SERVED_MODEL
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.requests import Attempt, Outcome, RequestJournal

RETRIED_STATUS = frozenset({408, 429, *range(500, 600)})
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 4.0
EXTRA_FIELDS = ["completion_token_ids", "engine_data", "worker_id", "timing"]
NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
"""Sent with each request, so that neither frontend nor engine has a default to fill in: the trainer scores the model's
whole distribution at the request's temperature."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. `temperature` > 0; log-probs are those of the processed distribution.

    `max_tokens` is cut, request by request, to what its prompt leaves of the context.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Completion:
    """One completion. `problem` names the first rule it breaks, None when it may be trained on.

    token_ids and logprobs: one entry a generated token; logprobs in nats. Times in seconds since the epoch.
    max_tokens: what this request was allowed; truncated: it ended there, not at a stop token.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    instance_id: int | None
    cached_tokens: int
    kv_hit_rate: float | None
    sent_at: float
    answered_at: float
    problem: str | None
    attempt: int = 1
    timing: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 0
    truncated: bool = False


class RolloutClient:
    """Sends token-ID prompts to the frontend. One instance may be used from one event loop at a time."""

    def __init__(
        self,
        url: str,
        gate: AdmissionGate,
        vocab_size: int,
        max_model_len: int,
        timeout_s: float,
        journal: RequestJournal | None = None,
        concurrency: int = 64,
    ) -> None:
        """`timeout_s` bounds one completion with all its attempts; `journal` hears of every attempt."""
        self._url = url
        self._gate = gate
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._timeout_s = timeout_s
        self._journal = journal
        self._concurrency = concurrency

    async def complete_all(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion per prompt, in order. Raises RolloutError on the first request that cannot be answered."""
        limit = asyncio.Semaphore(self._concurrency)
        async with self._http() as http:
            return list(await asyncio.gather(*(self._rollout(http, limit, prompt, sampling) for prompt in prompts)))

    async def complete_each(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, given_up: asyncio.Event
    ) -> list[Completion | RolloutError]:
        """As `complete_all`, but a request that cannot be answered gives its error in its place, and ends no other.

        Once `given_up` is set, what is still under way is lost.
        """
        limit = asyncio.Semaphore(self._concurrency)
        async with self._http() as http:
            tasks = [asyncio.ensure_future(self._rollout(http, limit, prompt, sampling)) for prompt in prompts]
            giving_up = asyncio.ensure_future(given_up.wait())
            try:
                while not given_up.is_set() and (left := [task for task in tasks if not task.done()]):
                    await asyncio.wait([giving_up, *left], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*tasks, giving_up):
                    task.cancel()
            return [outcome(found) for found in await asyncio.gather(*tasks, return_exceptions=True)]

    async def complete_on(
        self, instance_id: int, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[Completion]:
        """One completion per prompt, in order, by the named worker, past the gate: for probes while rollouts are shut
        out. The prompts are sent together."""
        async with self._http() as http:
            return list(
                await asyncio.gather(
                    *(self._complete(http, prompt, sampling, instance_id, "probe") for prompt in prompts)
                )
            )

    async def _rollout(
        self, http: httpx.AsyncClient, limit: asyncio.Semaphore, prompt: Sequence[int], sampling: Sampling
    ) -> Completion:
        async with limit:
            self._gate.enter()
            try:
                return await self._complete(http, prompt, sampling, None, "rollout")
            finally:
                self._gate.leave()

    def _http(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self._concurrency)
        return httpx.AsyncClient(base_url=self._url, timeout=self._timeout_s, limits=limits, trust_env=False)

    async def _complete(
        self, http: httpx.AsyncClient, prompt: Sequence[int], sampling: Sampling, instance_id: int | None, purpose: str
    ) -> Completion:
        """Send until answered: 408, 429, 5xx and transport errors are tried again, with backoff, until the deadline."""
        self._refuse_unsendable(prompt)
        left = self._max_model_len - len(prompt)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, left))
        body = request_body(prompt, sampling, instance_id)
        sample = str(uuid.uuid4())
        deadline = time.monotonic() + self._timeout_s
        for number in itertools.count(1):
            sent = _Sent(str(uuid.uuid4()), sample, purpose, number, time.time())
            try:
                answer = await self._post(http, body, sent.request_id, deadline)
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
                completion = read_completion(answer, sent.request_id, tuple(prompt), sampling, sent.at, number)
                self._note(sent, "rejected" if completion.problem else "accepted", completion.problem)
                return completion
        raise AssertionError("attempts are counted without end")

    def _note(self, sent: "_Sent", outcome: Outcome, reason: str | None) -> None:
        if self._journal is not None:
            self._journal.add(
                Attempt(sent.request_id, sent.sample, sent.purpose, sent.number, outcome, reason, sent.at, time.time())
            )

    async def _post(
        self, http: httpx.AsyncClient, body: dict[str, Any], request_id: str, deadline: float
    ) -> dict[str, Any]:
        """One attempt. Raises _TryAgainError for what another attempt may mend, RolloutError for what it will not."""
        left = deadline - time.monotonic()
        try:
            response = await http.post(
                "/v1/completions", json=body, headers={"x-dynamo-request-id": request_id}, timeout=max(left, 0.001)
            )
            if response.status_code == 200:
                answer: dict[str, Any] = response.json()
                return answer
        except (httpx.HTTPError, ValueError) as error:
            raise _TryAgainError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        text = f"the frontend answered {response.status_code}: {' '.join(response.text.split())[:300]}"
        if response.status_code in RETRIED_STATUS:
            raise _TryAgainError(text)
        raise RolloutError(f"request {request_id}: {text}")

    def _refuse_unsendable(self, prompt: Sequence[int]) -> None:
        """Refuse what Dynamo would answer with an error, or complete otherwise than asked."""
        if not prompt:
            raise RolloutError("prompt is empty: nothing to complete")
        for token in prompt:
            if not 0 <= token < self._vocab_size:
                raise RolloutError(f"prompt holds token ID {token}, outside the vocabulary of {self._vocab_size}")
        if len(prompt) >= self._max_model_len:
            raise RolloutError(
                f"prompt of {len(prompt)} tokens leaves no room for an answer in the context of "
                f"{self._max_model_len} (policy.generation.vllm_cfg.max_model_len)"
            )


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


def request_body(prompt: Sequence[int], sampling: Sampling, instance_id: int | None) -> dict[str, Any]:
    """A completion request; `instance_id` sends it to one worker, else the router chooses."""
    nvext: dict[str, Any] = {"extra_fields": EXTRA_FIELDS}
    if instance_id is not None:
        nvext["backend_instance_id"] = instance_id
    body: dict[str, Any] = {
        "model": SERVED_MODEL,
        "prompt": list(prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        **NEUTRAL,
        "logprobs": 0,
        "n": 1,
        "nvext": nvext,
    }
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop_strings:
        body["stop"] = list(sampling.stop_strings)
    return body


def read_completion(
    answer: dict[str, Any],
    request_id: str,
    prompt: tuple[int, ...],
    sampling: Sampling,
    sent_at: float,
    attempt: int = 1,
) -> Completion:
    """Turn Dynamo's answer into a Completion, with `problem` set to the first rule it breaks."""
    nvext = answer.get("nvext") or {}
    engine = nvext.get("engine_data") or {}
    choices = answer.get("choices") or [{}]
    listed = (choices[0].get("logprobs") or {}).get("token_logprobs")
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    timing = nvext.get("timing") or {}
    completion = Completion(
        request_id=request_id,
        prompt_token_ids=prompt,
        token_ids=tuple(nvext.get("completion_token_ids") or ()),
        logprobs=tuple(engine.get("completion_logprobs") or ()),
        instance_id=(nvext.get("worker_id") or {}).get("decode_worker_id"),
        cached_tokens=int(details.get("cached_tokens") or 0),
        kv_hit_rate=timing.get("kv_hit_rate"),
        sent_at=sent_at,
        answered_at=time.time(),
        problem=None,
        attempt=attempt,
        timing=timing,
        max_tokens=sampling.max_tokens,
        truncated=choices[0].get("finish_reason") == "length",
    )
    problem = find_problem(completion, answer.get("id"), engine, listed, len(choices))
    return completion if problem is None else Completion(**(vars(completion) | {"problem": problem}))


def find_problem(
    completion: Completion, answer_id: Any, engine: dict[str, Any], listed: Any, num_choices: int
) -> str | None:
    """The first rule the completion breaks, or None.

    engine: `nvext.engine_data`; listed: `choices[0].logprobs.token_logprobs`, Dynamo's second copy of the log-probs.
    """
    ids, logprobs = completion.token_ids, completion.logprobs
    if answer_id != f"cmpl-{completion.request_id}":
        return f"answer is for another request: {answer_id!r}, sent {completion.request_id}"
    if num_choices != 1:
        return f"{num_choices} choices in the answer, expected 1"
    if not ids:
        return "no completion token IDs in the answer"
    if tuple(engine.get("completion_token_ids") or ()) != ids:
        return "nvext.completion_token_ids and engine_data.completion_token_ids differ"
    if not logprobs:
        return "no completion log-probs in the answer"
    if len(logprobs) != len(ids):
        return f"{len(logprobs)} log-probs for {len(ids)} token IDs"
    if not all(isinstance(value, float) and math.isfinite(value) and value <= 1e-6 for value in logprobs):
        return "a log-prob is missing, not finite or above zero"
    if not isinstance(listed, list) or len(listed) != len(ids):
        return "choices[0].logprobs does not hold one log-prob per token"
    if any(abs(a - b) > 1e-4 for a, b in zip(listed, logprobs, strict=True)):
        return "choices[0].logprobs and engine_data.completion_logprobs differ"
    if tuple(engine.get("prompt_token_ids") or ()) != completion.prompt_token_ids:
        return "the engine completed another prompt than the one sent"
    if len(ids) > completion.max_tokens:
        return f"{len(ids)} tokens generated, {completion.max_tokens} allowed"
    if completion.truncated and len(ids) < completion.max_tokens:
        return f"cut after {len(ids)} tokens, {completion.max_tokens} allowed"
    if completion.instance_id is None:
        return "the answer does not name the worker that served it"
    return None

"""One completion on the wire: what a request says, how large its answer may be, and which answers may be trained on.

Request and answer follow Dynamo 1.3.0.post1: `POST /v1/completions` with token IDs, `nvext.extra_fields`, and the
answer's `nvext.engine_data`. The answer is decoded straight into the types below, which skips the three quarters of it
that nothing here reads (token texts, alternatives); no rule goes through its tokens in Python.
"""

import itertools
import math
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import msgspec

EXTRA_FIELDS = ["completion_token_ids", "engine_data", "worker_id", "timing"]
NO_TOP_K = -1
NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
"""Sent with each request, so that neither frontend nor engine has a default to fill in: the trainer scores what top-p
and top-k leave of the model's own distribution at the request's temperature."""

COPIES_DIFFER = 1e-4
"""Nats between Dynamo's two copies of a log-prob: one of them has single precision."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. `temperature` > 0; log-probs are those of the processed distribution.

    `max_tokens` is cut, request by request, to what its prompt leaves of the context. instances: workers that requests
    name in turn, where the frontend routes none by itself; empty, it chooses. prompt_logprobs: have those of the
    prompt's tokens too, by the model's own distribution at temperature 1.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = NO_TOP_K
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    instances: tuple[int, ...] = ()
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class Completion:
    """One completion. `problem` names the first rule it breaks, None when it may be trained on.

    token_ids and logprobs: one entry a generated token; logprobs in nats. Times in seconds since the epoch.
    max_tokens: what this request was allowed; truncated: it ended there, not at a stop token. policy_version: of the
    fleet when it was let in, last_version: when it was answered; another only where updates do not wait for rollouts.
    prompt_logprobs, where asked for: of each of the prompt's tokens but the first, in nats; empty where the engine had
    a part in its cache.
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
    policy_version: int | None = None
    last_version: int | None = None
    prompt_logprobs: tuple[float, ...] = ()


def request_body(model: str, prompt: Sequence[int], sampling: Sampling, instance_id: int | None) -> dict[str, Any]:
    """A completion request; `instance_id` sends it to one worker, else the router chooses."""
    nvext: dict[str, Any] = {"extra_fields": EXTRA_FIELDS}
    if sampling.prompt_logprobs:
        nvext["extra_fields"] = [*EXTRA_FIELDS, "prompt_logprobs"]
    if instance_id is not None:
        nvext["backend_instance_id"] = instance_id
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **NEUTRAL,
        "logprobs": 0,
        "n": 1,
        "nvext": nvext,
    }
    if sampling.prompt_logprobs:
        body["prompt_logprobs"] = 0  # of the prompt's own tokens, without alternatives
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.stop_token_ids:
        body["stop_token_ids"] = sampling.stop_token_ids
    if sampling.stop_strings:
        body["stop"] = sampling.stop_strings
    return body


def answer_bound(
    prompt_tokens: int, max_tokens: int, vocab_size: int, token_bytes: int, prompt_logprobs: bool = False
) -> int:
    """Bytes that an answer has at most. token_bytes: of the longest token's text, in UTF-8.

    A token's ID comes in two lists and its log-prob in three, each at most 24 digits; its text in three strings, where
    a byte takes six characters at most (`\\u0000`), and once as a list of bytes, four characters each. The rest of what
    names a token is less than 96 characters, and the rest of an answer less than 16 KiB. With prompt_logprobs a token
    of the prompt has its ID, a log-prob and its rank once more.
    """
    digits = len(str(vocab_size)) + 1
    prompt_token = digits + (2 * digits + 25 + 96 if prompt_logprobs else 0)
    texts = max(token_bytes, len("\ufffd".encode())) * (3 * 6 + 4)
    return (16 << 10) + prompt_tokens * prompt_token + max_tokens * (2 * digits + 3 * 25 + texts + 96)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _EngineData(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    completion_logprobs: list[float | None] | None = None


class _WorkerId(msgspec.Struct):
    decode_worker_id: int | None = None


class _TokenLogprob(msgspec.Struct):
    logprob: float


class Extension(msgspec.Struct):
    completion_token_ids: list[int] | None = None
    engine_data: _EngineData | None = None
    worker_id: _WorkerId | None = None
    timing: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, _TokenLogprob] | None] | None = None


class _Answer(msgspec.Struct):
    """What is read of an answer. Anything may be missing: `find_problem` says what must not."""

    id: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    nvext: Extension | None = None


_DECODER = msgspec.json.Decoder(_Answer)


def read_completion(
    body: bytes, request_id: str, prompt: tuple[int, ...], sampling: Sampling, sent_at: float, attempt: int = 1
) -> Completion:
    """Turn Dynamo's answer into a Completion, with `problem` set to the first rule it breaks.

    Raises ValueError for what is not JSON: it was cut on its way.
    """
    answer, misshapen = decode_answer(_DECODER, _Answer, body)
    choices = answer.choices or [_Choice()]
    asked = Asked(
        f"cmpl-{request_id}", request_id, prompt, sampling.max_tokens, sent_at, attempt, sampling.prompt_logprobs
    )
    told = Told(
        answer.id, len(choices), choices[0].finish_reason, choices[0].logprobs and choices[0].logprobs.token_logprobs
    )
    details = answer.usage and answer.usage.prompt_tokens_details
    return as_completion(asked, told, details and details.cached_tokens, answer.nvext, misshapen)


AnswerType = TypeVar("AnswerType")


def decode_answer(
    decoder: "msgspec.json.Decoder[AnswerType]", kind: type[AnswerType], body: bytes
) -> tuple[AnswerType, str | None]:
    """The answer, and None; an empty one, and why, where it has another shape. Raises ValueError for no JSON."""
    try:
        return decoder.decode(body), None
    except msgspec.ValidationError as error:
        return kind(), f"the answer is not shaped as Dynamo's are: {error}"
    except msgspec.DecodeError as error:
        raise ValueError(f"the answer is not JSON: {error}") from error


@dataclass(frozen=True)
class Asked:
    """What an answer is held against. answer_id: the one that it must have."""

    answer_id: str
    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sent_at: float
    attempt: int
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class Told:
    """What an answer says in the form of its endpoint. listed: its own copy of the log-probs."""

    answer_id: str | None
    choices: int
    finish_reason: str | None
    listed: Sequence[float | None] | None


def as_completion(
    asked: Asked, told: Told, cached_tokens: int | None, nvext: Extension | None, misshapen: str | None
) -> Completion:
    """A Completion, with `problem` set to the first rule that the answer breaks; `misshapen` comes before all."""
    nvext = nvext or Extension()
    engine = nvext.engine_data or _EngineData()
    timing = nvext.timing or {}
    logprobs = engine.completion_logprobs or []
    if None in logprobs:
        logprobs = [math.nan if value is None else value for value in logprobs]
    completion = Completion(
        request_id=asked.request_id,
        prompt_token_ids=asked.prompt,
        token_ids=tuple(nvext.completion_token_ids or ()),
        logprobs=tuple(cast("list[float]", logprobs)),
        instance_id=nvext.worker_id.decode_worker_id if nvext.worker_id else None,
        cached_tokens=cached_tokens or 0,
        kv_hit_rate=timing.get("kv_hit_rate"),
        sent_at=asked.sent_at,
        answered_at=time.time(),
        problem=None,
        attempt=asked.attempt,
        timing=timing,
        max_tokens=asked.max_tokens,
        truncated=told.finish_reason == "length",
        prompt_logprobs=prompt_logprobs(asked.prompt, nvext) if asked.prompt_logprobs and not cached_tokens else (),
    )
    problem = misshapen or find_problem(completion, asked, told, engine)
    return completion if problem is None else replace(completion, problem=problem)


def prompt_logprobs(prompt: tuple[int, ...], nvext: Extension) -> tuple[float, ...]:
    """Of each of the prompt's tokens but the first; one that the answer lacks is not a number."""
    told = nvext.prompt_logprobs or []
    missing = _TokenLogprob(math.nan)
    return tuple(
        (entry or {}).get(str(token), missing).logprob
        for token, entry in itertools.zip_longest(prompt[1:], told[1 : len(prompt)])
    )


def find_problem(completion: Completion, asked: Asked, told: Told, engine: "_EngineData") -> str | None:
    """The first rule the completion breaks, or None. engine: `nvext.engine_data`."""
    ids, logprobs, listed = completion.token_ids, completion.logprobs, told.listed
    if told.answer_id != asked.answer_id:
        return f"answer is for another request: {told.answer_id!r}, sent {completion.request_id}"
    if told.choices != 1:
        return f"{told.choices} choices in the answer, expected 1"
    if not ids:
        return "no completion token IDs in the answer"
    if tuple(engine.completion_token_ids or ()) != ids:
        return "nvext.completion_token_ids and engine_data.completion_token_ids differ"
    if not logprobs:
        return "no completion log-probs in the answer"
    if len(logprobs) != len(ids):
        return f"{len(logprobs)} log-probs for {len(ids)} token IDs"
    if not math.isfinite(sum(logprobs)) or max(logprobs) > 1e-6:
        return "a log-prob is missing, not finite or above zero"
    if not listed or len(listed) != len(ids):
        return "choices[0].logprobs does not hold one log-prob per token"
    if _differ(listed, logprobs):
        return "choices[0].logprobs and engine_data.completion_logprobs differ"
    if tuple(engine.prompt_token_ids or ()) != completion.prompt_token_ids:
        return "the engine completed another prompt than the one sent"
    if len(ids) > completion.max_tokens:
        return f"{len(ids)} tokens generated, {completion.max_tokens} allowed"
    if completion.truncated and len(ids) < completion.max_tokens:
        return f"cut after {len(ids)} tokens, {completion.max_tokens} allowed"
    if completion.instance_id is None:
        return "the answer does not name the worker that served it"
    if completion.prompt_logprobs and not math.isfinite(sum(completion.prompt_logprobs)):
        return "nvext.prompt_logprobs does not hold a log-prob of each of the prompt's tokens"
    return None


def _differ(listed: Sequence[float | None], logprobs: Sequence[float]) -> bool:
    """Whether a log-prob is missing from `listed`, or further than COPIES_DIFFER from its other copy."""
    if None in listed:
        return True
    # The largest difference is at most the root of the sum of their squares, which is the quicker to have.
    return math.dist(listed, logprobs) > COPIES_DIFFER and any(  # type: ignore[arg-type]
        map(COPIES_DIFFER.__lt__, map(abs, map(operator.sub, listed, logprobs)))
    )

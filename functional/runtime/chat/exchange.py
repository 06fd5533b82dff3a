"""One turn on the wire: the request that Dynamo gets, and the answer that the client gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from functional.runtime.chat.request import ChatRequest
from functional.runtime.rollout.completion import (
    EXTRA_FIELDS,
    NEUTRAL,
    Asked,
    Completion,
    Extension,
    Sampling,
    Told,
    as_completion,
    decode_answer,
)


class _TokenLogprob(msgspec.Struct):
    logprob: float | None = None


class _Listed(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct):
    message: dict[str, Any] = {}
    finish_reason: str | None = None
    logprobs: _Listed | None = None


class _Answer(msgspec.Struct):
    """What is read of an answer. Anything may be missing."""

    id: str | None = None
    created: int = 0
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    nvext: Extension | None = None


class _RawChoice(msgspec.Struct):
    logprobs: msgspec.Raw = msgspec.Raw(b"null")


class _RawAnswer(msgspec.Struct):
    """What a client may ask for, as Dynamo wrote it."""

    choices: list[_RawChoice]
    nvext: dict[str, msgspec.Raw]


_DECODER = msgspec.json.Decoder(_Answer)
_RAW = msgspec.json.Decoder(_RawAnswer)


@dataclass(frozen=True)
class ChatCompletion:
    """A completion, and the client's answer as JSON: empty where the completion has a problem."""

    completion: Completion
    body: bytes

    @property
    def problem(self) -> str | None:
        return self.completion.problem


def chat_body(request: ChatRequest, model: str, prompt: Sequence[int], sampling: Sampling) -> bytes:
    """What Dynamo gets: the client's fields, the policy's sampling, and the prompt as token IDs."""
    extra = list(dict.fromkeys([*EXTRA_FIELDS, *request.extra_fields]))
    body = request.sent | {
        "model": model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **NEUTRAL,
        "logprobs": True,
        "nvext": request.nvext | {"extra_fields": extra, "token_data": prompt},
    }
    if sampling.stop_token_ids:
        body["stop_token_ids"] = sampling.stop_token_ids
    return msgspec.json.encode(body)


def chat_answer_bound(prompt_tokens: int, max_tokens: int, vocab_size: int, token_bytes: int, alternatives: int) -> int:
    """Bytes that an answer has at most. token_bytes: of the longest token's text; alternatives: `top_logprobs`.

    A token's ID comes in two lists and its log-prob in one; each entry of the log-probs has its text, that as a list of
    bytes and its log-prob; its text comes once more, twice where calls and their reasoning are split off.
    """
    digits = len(str(vocab_size)) + 1
    text = max(token_bytes, len("\ufffd".encode()))
    entry = text * (6 + 4) + 25 + 96
    token = 2 * digits + 25 + 2 * 6 * text + entry * (1 + alternatives)
    return (64 << 10) + prompt_tokens * digits + max_tokens * token


def read_chat(body: bytes, asked: Asked, model: str, request: ChatRequest) -> ChatCompletion:
    """Turn Dynamo's answer into a completion, by the rules of all rollouts, and into the client's answer.

    Raises ValueError for what is no JSON.
    """
    answer, misshapen = decode_answer(_DECODER, _Answer, body)
    choices = answer.choices or [_Choice()]
    choice = choices[0]
    listed = choice.logprobs and choice.logprobs.content
    told = Told(answer.id, len(choices), choice.finish_reason, listed and [one.logprob for one in listed])
    cached = ((answer.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    completion = as_completion(asked, told, cached, answer.nvext, misshapen)
    if completion.problem is not None:
        return ChatCompletion(completion, b"")
    message = choice.message | {
        "prompt_token_ids": completion.prompt_token_ids,
        "generation_token_ids": completion.token_ids,
        "generation_log_probs": completion.logprobs,
    }
    shown_choice = {"index": 0, "message": message, "finish_reason": choice.finish_reason, "logprobs": None}
    shown = {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": model,
        "choices": [shown_choice],
        "usage": answer.usage,
    }
    if request.wants_logprobs or request.extra_fields:
        raw = _RAW.decode(body)
        if request.wants_logprobs:
            shown_choice["logprobs"] = raw.choices[0].logprobs
        if request.extra_fields:
            shown["nvext"] = {name: raw.nvext[name] for name in request.extra_fields if name in raw.nvext}
    return ChatCompletion(completion, msgspec.json.encode(shown))

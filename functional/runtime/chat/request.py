"""A chat request as a client sends it: what may stand in it, field by field."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from functional.runtime.errors import RolloutError

ID_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""What an answer's message carries beside OpenAI's fields, and gives back to the next turn."""
RENDERED = ("add_generation_prompt", "documents", "required_prefix_token_ids")
"""Used in rendering; Dynamo 1.3.0.post1 answers 400 for them."""
OURS = ("stream", "stream_options", "n", "model", "max_tokens", "max_completion_tokens")
"""Not passed on, or set anew."""
REFUSED = {
    "chat_template": "the policy's own template is used, with chat_template_kwargs",
    "continue_final_message": "a turn of the assistant is always whole",
    "stop": "Dynamo returns no token IDs for an answer that ends at a stop string: use stop_token_ids",
    "functions": "use tools",
    "function_call": "use tools",
    "logit_bias": "it would sample from another distribution than the policy's",
}
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False, True),
    "top_logprobs": tuple(range(21)),
    "tool_choice": ("auto", "none"),
}
"""What a request may say of these: everything else changes what is sampled, and the log-probs with it."""
MAX_STOP_TOKEN_IDS = 4
"""Behind its own check, Dynamo 1.3.0.post1 answers 500 for more."""


class ChatError(RolloutError):
    """A request that may not be sent. field: the one at fault, as `messages.2.content`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class ChatRequest:
    """A request that may be rendered.

    messages: as the template takes them, without token IDs, arguments of calls as mappings; sent: the fields that go to
    Dynamo as they came, `messages` among them; prefix: exact token IDs up to the end of message `prefix_turn`, empty
    where the request has none; model: the name that it gives.
    """

    messages: list[dict[str, Any]]
    sent: dict[str, Any]
    tools: list[Any] | None
    template_kwargs: dict[str, Any]
    documents: list[Any] | None
    add_generation_prompt: bool
    prefix: tuple[int, ...]
    prefix_turn: int
    max_tokens: int | None
    stop_token_ids: tuple[int, ...]
    nvext: dict[str, Any]
    model: Any
    wants_logprobs: bool

    @property
    def extra_fields(self) -> list[str]:
        """What of Dynamo's `nvext` the client asks for."""
        named: list[str] = self.nvext.get("extra_fields", [])
        return named


def read_request(body: bytes, temperature: float, exclude_tools: bool = True) -> ChatRequest:
    """Judge a request's fields. temperature: the policy's, the only one that a request may name; exclude_tools: no tool
    is rendered under `tool_choice: none`.

    Raises ChatError naming the first field at fault.
    """
    try:
        return _read(body, temperature, exclude_tools)
    except msgspec.ValidationError:
        raise ChatError("body", "must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ChatError("body", f"is no JSON that can be read: {error}") from None


def _read(body: bytes, temperature: float, exclude_tools: bool) -> ChatRequest:
    raw = _OBJECT.decode(body)
    raw_messages = raw.pop("messages", _NULL)
    given = {name: msgspec.json.decode(value) for name, value in raw.items()}
    _refuse(given, temperature)
    messages, ids = _messages(raw_messages)
    prefix, turn = _prefix(given.get("required_prefix_token_ids"), messages, ids)
    nvext = _mapping(given, "nvext")
    if "token_data" in nvext:
        raise ChatError("nvext.token_data", "is what the messages are rendered to: use required_prefix_token_ids")
    fields = nvext.get("extra_fields", [])
    if not isinstance(fields, list) or not all(isinstance(name, str) for name in fields):
        raise ChatError("nvext.extra_fields", "must be a list of names")
    tools = given.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ChatError("tools", "must be a list")
    dropped = (*RENDERED, *OURS, "nvext")
    return ChatRequest(
        messages=[_for_template(message, f"messages.{index}") for index, message in enumerate(messages)],
        sent={name: value for name, value in given.items() if name not in dropped} | {"messages": messages},
        tools=None if not tools or (exclude_tools and given.get("tool_choice") == "none") else tools,
        template_kwargs=_template_kwargs(given),
        documents=given.get("documents"),
        add_generation_prompt=bool(given.get("add_generation_prompt", True)),
        prefix=prefix,
        prefix_turn=turn,
        max_tokens=_max_tokens(given),
        stop_token_ids=_stop_token_ids(given),
        nvext=nvext,
        model=given.get("model"),
        wants_logprobs=bool(given.get("logprobs")),
    )


def _refuse(given: Mapping[str, Any], temperature: float) -> None:
    if given.get("stream"):
        raise ChatError("stream", "answers come whole: token IDs and log-probs are checked before they are returned")
    if given.get("n") not in (None, 1):
        raise ChatError("n", f"one answer a request, not {given['n']!r}: Dynamo returns token IDs for one only")
    for name, reason in REFUSED.items():
        if given.get(name) not in (None, False, [], {}, ""):
            raise ChatError(name, reason)
    for name, allowed in NEUTRAL_VALUES.items():
        value = given.get(name)
        if value is not None and value not in allowed:
            shown = " or ".join(map(repr, allowed[:2]))
            raise ChatError(name, f"must be {shown}, not {value!r}: the policy's own distribution is sampled")
    asked = given.get("temperature")
    if asked is not None and not (_is_number(asked) and math.isclose(asked, temperature)):
        raise ChatError("temperature", f"must be the policy's, {temperature:g}, not {asked!r}")
    form = given.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise ChatError("response_format", "must be text: another form would change what is sampled")


Fields = dict[str, msgspec.Raw]

_NULL = msgspec.Raw(b"null")
_OBJECT = msgspec.json.Decoder(Fields)
_MESSAGES = msgspec.json.Decoder(list[Fields])
_IDS = msgspec.json.Decoder(list[int])


def _messages(raw: msgspec.Raw) -> tuple[list[dict[str, Any]], list[Fields]]:
    """The messages without their ID fields, and these, not decoded: of all but one turn nobody reads them."""
    try:
        found = _MESSAGES.decode(raw)
    except msgspec.ValidationError:
        given = msgspec.json.decode(raw)
        if not isinstance(given, list):
            raise ChatError("messages", "must be a list with at least one message") from None
        index = next(index for index, message in enumerate(given) if not isinstance(message, dict))
        raise ChatError(f"messages.{index}", "must be an object") from None
    if not found:
        raise ChatError("messages", "must be a list with at least one message")
    messages, ids = [], []
    for index, fields in enumerate(found):
        ids.append({name: fields.pop(name) for name in ID_FIELDS if name in fields})
        message = {name: msgspec.json.decode(value) for name, value in fields.items()}
        if not isinstance(message.get("role"), str):
            raise ChatError(f"messages.{index}.role", "must be a string")
        messages.append(message)
    return messages, ids


def _prefix(required: Any, messages: Sequence[Mapping[str, Any]], ids: Sequence[Fields]) -> tuple[tuple[int, ...], int]:
    """The exact token IDs to begin with, and the message that they end with: the last one of the assistant with IDs of
    its own, or with `required` and none such, the last of the assistant."""
    own: tuple[int, ...] = ()
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    known = [index for index in assistants if bytes(ids[index].get("prompt_token_ids", _NULL)) != b"null"]
    turn = known[-1] if known else -1
    if known:
        for name in ("prompt_token_ids", "generation_token_ids"):
            own += _raw_ids(ids[turn].get(name, _NULL), f"messages.{turn}.{name}")
    if required is None or required == []:
        return own, turn
    wanted = _ids(required, "required_prefix_token_ids")
    if not assistants:
        raise ChatError("required_prefix_token_ids", "no message of the assistant is there that it could end with")
    if known and wanted != own:
        raise ChatError("required_prefix_token_ids", f"differs from the token IDs of messages.{turn}")
    return wanted, turn if known else assistants[-1]


def _raw_ids(raw: msgspec.Raw, field: str) -> tuple[int, ...]:
    try:
        found = _IDS.decode(raw)
    except msgspec.ValidationError:
        found = []
    if not found:
        raise ChatError(field, "must be a list of token IDs")
    return tuple(found)


def _ids(given: Any, field: str) -> tuple[int, ...]:
    if not isinstance(given, list) or not given or not set(map(type, given)) <= {int}:
        raise ChatError(field, "must be a list of token IDs")
    return tuple(given)


def _for_template(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Texts as strings, arguments of calls as mappings: what templates of models take."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        message = message | {"content": _text(content, place)}
    elif not isinstance(content, str | None):
        raise ChatError(f"{place}.content", "must be a string, or a list of text parts")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise ChatError(f"{place}.tool_calls", "must be a list")
    return message | {"tool_calls": [_call(call, f"{place}.tool_calls.{index}") for index, call in enumerate(calls)]}


def _text(parts: Sequence[Any], place: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatError(f"{place}.content.{index}", "must be a part of type text: the policy reads nothing else")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(f"{place}.function.name", "must be a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except msgspec.DecodeError as error:
            raise ChatError(f"{place}.function.arguments", f"is no JSON: {error}") from None
    if not isinstance(arguments, dict | None):
        raise ChatError(f"{place}.function.arguments", "must be a JSON object")
    return call | {"function": function | {"arguments": arguments or {}}}


def _template_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    effort = given.get("reasoning_effort")
    return _mapping(given, "chat_template_kwargs") | ({} if effort is None else {"reasoning_effort": effort})


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    """The smaller of the two names for it; None where neither is given."""
    limits = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = given.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ChatError(name, f"must be a whole number from 1 up, not {value!r}")
        limits.append(value)
    return min(limits, default=None)


def _stop_token_ids(given: Mapping[str, Any]) -> tuple[int, ...]:
    value = given.get("stop_token_ids")
    if value is None or value == []:
        return ()
    return _ids(value, "stop_token_ids")


def _mapping(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ChatError(name, "must be an object")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

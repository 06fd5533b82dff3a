"""What a chat request may say: every refusal names its field; what is kept, taken out and put in its place."""

import contextlib
import json
import random

import pytest

from functional.runtime.chat.exchange import chat_answer_bound, chat_body
from functional.runtime.chat.request import ID_FIELDS, ChatError, read_request
from functional.runtime.rollout.completion import Sampling

pytestmark = pytest.mark.unit

USER = {"role": "user", "content": "3+4-5"}
ANSWER = {"role": "assistant", "content": "12", "prompt_token_ids": [1, 2], "generation_token_ids": [3, 4]}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def read(messages=(USER,), **fields):
    return read_request(json.dumps({"messages": messages, **fields}).encode(), temperature=1.0)


REFUSED = {
    "messages": [{"messages": []}, {"messages": None}, {"messages": "hi"}],
    "messages.0": [{"messages": ["hi"]}],
    "messages.0.role": [{"messages": [{"content": "hi"}]}],
    "messages.0.content": [{"messages": [{"role": "user", "content": 3}]}],
    "messages.0.content.1": [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]}
    ],
    "messages.1.prompt_token_ids": [
        {"messages": [USER, ANSWER | {"prompt_token_ids": bad}]} for bad in ("x", [1.5], [])
    ],
    "messages.1.generation_token_ids": [
        {"messages": [USER, ANSWER | {"generation_token_ids": bad}]} for bad in (None, [True], [])
    ],
    "messages.1.tool_calls": [{"messages": [USER, {"role": "assistant", "tool_calls": {}}]}],
    "messages.1.tool_calls.0.function.arguments": [
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": bad}}]},
            ]
        }
        for bad in ("{", "[1]", 3)
    ],
    "messages.1.tool_calls.0.function.name": [{"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}],
    "stream": [{"stream": True}],
    "n": [{"n": 2}, {"n": 0}],
    "temperature": [{"temperature": 0.7}, {"temperature": "hot"}, {"temperature": True}],
    "top_p": [{"top_p": 0.9}],
    "top_k": [{"top_k": 20}],
    "presence_penalty": [{"presence_penalty": 0.5}],
    "logit_bias": [{"logit_bias": {"3": 1}}],
    "tool_choice": [{"tool_choice": "required"}, {"tool_choice": {"type": "function"}}],
    "response_format": [{"response_format": {"type": "json_object"}}],
    "stop": [{"stop": ["\n"]}],
    "chat_template": [{"chat_template": "{{ messages }}"}],
    "chat_template_kwargs": [{"chat_template_kwargs": [1]}],
    "max_tokens": [{"max_tokens": 0}, {"max_tokens": 1.5}],
    "max_completion_tokens": [{"max_completion_tokens": -1}],
    "tools": [{"tools": {}}],
    "nvext": [{"nvext": 3}],
    "nvext.token_data": [{"nvext": {"token_data": [1]}}],
    "nvext.extra_fields": [{"nvext": {"extra_fields": "timing"}}, {"nvext": {"extra_fields": [1]}}],
    "required_prefix_token_ids": [
        {"required_prefix_token_ids": [1]},
        {"messages": [USER, ANSWER, USER], "required_prefix_token_ids": [9]},
        {"messages": [USER, ANSWER, USER], "required_prefix_token_ids": "x"},
    ],
}


@pytest.mark.parametrize(("field", "fields"), [(field, one) for field, cases in REFUSED.items() for one in cases])
def test_what_is_refused_is_named(field, fields):
    with pytest.raises(ChatError) as refused:
        read(**fields)
    assert refused.value.field == field


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'"x"',
        b'{"a": ' + NESTED,
        b'{"messages": ' + NESTED,
        b'{"messages": [{"a": "\xff"}]}',
    ],
)
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(ChatError) as refused:
        read_request(body, 1.0)
    assert refused.value.field == "body"


@pytest.mark.parametrize("seed", range(300))
def test_damaged_bodies_are_refused_or_read_but_never_fail(seed):
    rng = random.Random(seed)
    messages = [USER, ANSWER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER]
    whole = {"messages": messages, "tools": [TOOL], "n": 1, "max_tokens": 3, "nvext": {"extra_fields": ["timing"]}}
    body = bytearray(json.dumps(whole).encode())
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(body))
        if rng.random() < 0.5:
            body[place] = rng.choice(b'{}[]",:0e-\\\x00\xff tn')
        else:
            del body[place : place + rng.randint(1, 9)]
    with contextlib.suppress(ChatError):
        read_request(bytes(body), 1.0)


def test_a_request_as_openai_s_library_and_gym_send_it():
    request = read(
        model="m",
        n=1,
        stream=False,
        temperature=1.0,
        top_p=1.0,
        logprobs=True,
        top_logprobs=0,
        return_tokens_as_token_ids=True,
        tools=[TOOL],
        tool_choice="auto",
        max_tokens=9,
        max_completion_tokens=7,
        seed=3,
        metadata={"a": "b"},
    )
    assert (request.max_tokens, request.tools, request.wants_logprobs) == (7, [TOOL], True)
    assert request.sent["seed"] == 3


def test_ids_are_those_of_the_last_turn_that_has_some_and_stay_here():
    later = ANSWER | {"prompt_token_ids": [1, 2, 3, 4, 5], "generation_token_ids": [6]}
    request = read([USER, ANSWER, USER, later, USER, {"role": "assistant", "content": "edited"}, USER])
    assert (request.prefix, request.prefix_turn) == ((1, 2, 3, 4, 5, 6), 3)
    assert not any(name in message for message in request.sent["messages"] for name in ID_FIELDS)
    assert not any(name in message for message in request.messages for name in ID_FIELDS)


def test_a_required_prefix_ends_with_the_last_turn_of_the_assistant():
    plain = {"role": "assistant", "content": "12"}
    request = read([USER, plain, USER], required_prefix_token_ids=[7, 8])
    assert (request.prefix, request.prefix_turn) == ((7, 8), 1)
    assert read([USER, ANSWER, USER], required_prefix_token_ids=[1, 2, 3, 4]).prefix == (1, 2, 3, 4)


def test_a_template_gets_texts_and_arguments_as_mappings_and_dynamo_what_the_client_sent():
    said = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    request = read([parts, said])
    assert request.messages[0]["content"] == "a\nb"
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 3}
    assert request.sent["messages"] == [parts, said]


def test_no_tools_are_rendered_where_none_may_be_chosen():
    assert read(tools=[TOOL], tool_choice="none").tools is None
    body = json.dumps({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}).encode()
    assert read_request(body, 1.0, exclude_tools=False).tools == [TOOL]


def test_dynamo_gets_the_policy_s_sampling_the_prompt_and_the_caller_s_nvext():
    request = read(
        model="mine",
        n=1,
        add_generation_prompt=True,
        documents=[],
        max_tokens=100,
        nvext={"extra_fields": ["timing", "mine"], "agent_hints": {"osl": 3}},
        user="u",
    )
    body = json.loads(chat_body(request, "policy", (5, 6), Sampling(8, 1.0, stop_token_ids=(2,))))
    assert body["nvext"]["token_data"] == [5, 6]
    assert {"engine_data", "completion_token_ids", "worker_id", "timing", "mine"} == set(body["nvext"]["extra_fields"])
    assert body["nvext"]["agent_hints"] == {"osl": 3}
    assert (body["model"], body["max_tokens"], body["stop_token_ids"], body["user"]) == ("policy", 8, [2], "u")
    assert (body["temperature"], body["top_p"], body["logprobs"]) == (1.0, 1.0, True)
    assert body.keys().isdisjoint({"n", "stream", "add_generation_prompt", "documents", "required_prefix_token_ids"})


def test_the_bound_leaves_room_for_the_longest_answer_there_may_be():
    tokens, text, number = 50, "\u0000" * 8, -0.123456789012345678e-101
    entry = {"token": text, "logprob": number, "bytes": [255] * 8}
    ids = [99_999] * tokens
    answer = {
        "choices": [
            {
                "message": {"content": text * tokens, "reasoning_content": text * tokens},
                "logprobs": {"content": [entry | {"top_logprobs": [entry] * 3}] * tokens},
            }
        ],
        "nvext": {
            "completion_token_ids": ids,
            "engine_data": {
                "prompt_token_ids": [99_999] * 512,
                "completion_token_ids": ids,
                "completion_logprobs": [number] * tokens,
            },
        },
    }
    size = len(json.dumps(answer, separators=(",", ":")))
    bound = chat_answer_bound(512, tokens, 99_999, 8, alternatives=3)
    assert size < bound < 2 * size + (128 << 10)

"""Agents with tools: questions, what the model was taught, rewards and advantages of conversations, their checks."""

import asyncio
import random

import pytest
from transformers import AutoTokenizer

from functional.runtime.recipe.model import GrpoConfig
from functional.runtime.rollout.completion import Completion, Sampling
from functional.runtime.rollout.requests import Attempt
from functional.suite.agent_batch import (
    check_conversations,
    check_rewards_joined,
    conversation_records,
    score_conversations,
)
from functional.suite.agents import AgentClient, Conversation, TurnError
from functional.suite.checklist import Checklist
from functional.suite.models import TOOLS, TOOLS_DIR, find_model
from functional.suite.tool_lessons import call, lesson, make_tool_model, spelled
from functional.suite.tool_questions import TOOLS as TOOL_LIST
from functional.suite.tool_questions import ToolQuestion, tool_questions, use_tool
from functional.suite.vocabulary import TOOL_VOCAB, tool_tokenizer

pytestmark = pytest.mark.unit

QUESTION = ToolQuestion(3, 4, 5, ("+", "-"))
GRPO = GrpoConfig(num_prompts_per_step=1, num_generations_per_prompt=2)


def turn(request_id, prompt, ids):
    return Completion(request_id, tuple(prompt), tuple(ids), (-0.1,) * len(ids), 7, 0, None, 1.0, 2.0, None)


def conversation(name, said="2", torn=False):
    first = turn(f"{name}1", [1, 2], [3])
    return Conversation(QUESTION, (first, turn(f"{name}2", [1, 2, 4 if torn else 3, 5], [6])), said, calls=1)


def test_questions_have_one_answer_each_and_are_never_below_zero():
    questions = tool_questions()
    assert (QUESTION.text, QUESTION.answer) == ("3+4-5", 2)
    assert len({question.text for question in questions}) == len(questions) > 2000
    assert all(question.answer == eval(question.text) >= 0 for question in questions)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", '{"a": 3, "b": 4}', "7"),
        ("sub", '{"a": "9", "b": "4"}', "5"),
        ("mul", '{"a": 3, "b": 4}', None),
        ("add", '{"a": 3}', None),
        ("add", '{"a": "x", "b": 4}', None),
        ("add", "[]", None),
        ("add", "{", None),
    ],
)
def test_a_call_that_is_none_has_no_result(name, arguments, result):
    assert use_tool(name, arguments) == result


def test_a_lesson_is_what_the_template_renders():
    """With canonical spelling its text is, turn by turn, the template's; the assistant's tokens are marked."""
    tokenizer = tool_tokenizer()
    ids, own = lesson(tokenizer, QUESTION, random.Random(1))
    hf = AutoTokenizer.from_pretrained(str(TOOLS_DIR))
    text = hf.decode(ids)
    written = "".join(hf.decode([token]) for token, mine in zip(ids, own, strict=True) if mine)
    assert written.count("<tool_call>") == 2
    assert written.count("<|im_end|>") == 3
    opening = hf.apply_chat_template(
        [{"role": "user", "content": QUESTION.text}], tools=TOOL_LIST, add_generation_prompt=True, tokenize=False
    )
    assert text.startswith(opening)
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    rendered = hf.apply_chat_template([message], tokenize=False)
    assert rendered == f"<|im_start|>assistant\n{call('add', 3, 4)}<|im_end|>\n"


def test_the_teacher_spells_numbers_in_more_than_one_way():
    tokenizer = tool_tokenizer()
    spellings = {tuple(spelled(tokenizer, "12", random.Random(seed))) for seed in range(20)}
    assert len(spellings) == 2
    assert {tokenizer.decode(list(ids)) for ids in spellings} == {"12"}
    assert tokenizer.get_vocab_size() == TOOL_VOCAB


def test_the_embedded_model_is_there_and_the_same_steps_make_the_same_bytes(tmp_path):
    assert find_model(TOOLS, tmp_path, print) == TOOLS_DIR
    first, second = (make_tool_model(tmp_path / name, steps=2) for name in "ab")
    assert first.sha256 == second.sha256
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(p.name for p in TOOLS_DIR.iterdir())


def test_each_turn_is_a_sample_with_the_reward_and_advantage_of_its_conversation():
    batch = score_conversations([conversation("a"), conversation("b", said="3")], GRPO)
    assert batch.rewards == [1.0, 1.0, 0.0, 0.0]
    assert batch.advantages[0] == batch.advantages[1] == -batch.advantages[2] == -batch.advantages[3] > 0
    assert batch.mean_reward == 0.5
    assert [sample.completion_ids for sample in batch.samples()] == [(3,), (6,)] * 2
    records = list(conversation_records(batch, "run", 1, 4, 2))
    assert [(r.rollout, r.turn, r.group, r.policy_version, r.reward) for r in records] == [
        (0, 1, 0, 4, 1.0),
        (0, 2, 0, 4, 1.0),
        (1, 1, 0, 4, 0.0),
        (1, 2, 0, 4, 0.0),
    ]


def test_a_conversation_whose_ids_do_not_go_on_is_not_trained_on_and_its_group_neither():
    batch = score_conversations([conversation("a"), conversation("b", torn=True)], GRPO)
    assert batch.advantages == [None] * 4
    assert batch.rewards == [1.0, 1.0, None, None]
    checks = Checklist()
    check_conversations(checks, "step1.chat", batch, lambda completion: True)
    exact, tools = checks.checks
    assert not exact.passed
    assert "b2: its prompt does not begin with the turn before it" in exact.detail
    assert tools.passed


def test_a_turn_that_may_not_be_trained_on_keeps_its_conversation_out():
    refused = Conversation(QUESTION, (turn("a1", [1], [2]),), "", calls=1, fault="request a2: no log-probs")
    batch = score_conversations([refused, conversation("b")], GRPO)
    assert batch.advantages == [None] * 3
    checks = Checklist()
    check_conversations(checks, "step1.chat", batch, lambda completion: False)
    assert not checks.checks[0].passed
    assert "request a2: no log-probs" in checks.checks[0].detail


class Refusing(AgentClient):
    """Answers a first turn with a call, and refuses the second."""

    def __init__(self, kind):
        self._kind = kind

    async def turn(self, messages, sampling):
        if len(messages) > 1:
            raise TurnError("refused", self._kind)
        call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
        return turn("a1", [1], [2]), {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("kind", "problem"), [("answer_rejected", "refused"), ("context_length_exceeded", None), ("fleet_error", "raised")]
)
def test_a_refused_turn_ends_its_conversation_or_all(kind, problem):
    (found,) = asyncio.run(complete_one(Refusing(kind)))
    if problem == "raised":
        assert isinstance(found, TurnError)
    else:
        assert (found.problem, found.reward, len(found.turns)) == (problem, 0.0, 1)


async def complete_one(agents):
    return await agents.complete_each([QUESTION], Sampling(8), asyncio.Event())


def test_conversations_without_a_call_or_a_second_turn_fail_their_checks():
    alone = Conversation(QUESTION, (turn("a", [1], [2]),), "2", calls=0)
    checks = Checklist()
    check_conversations(checks, "step1.chat", score_conversations([alone, alone], GRPO), lambda completion: False)
    assert [check.passed for check in checks.checks] == [False, False]


def attempt(request_id, outcome="accepted"):
    return Attempt(request_id, request_id, "rollout", 1, outcome, None, 1.0, 2.0)


@pytest.mark.parametrize(
    ("missing", "served", "passed"),
    [
        (None, {"a1": {7}, "a2": {7, 8}, "b1": {7}, "b2": {7}}, True),
        ("a2", {"a1": {7}, "a2": {7}, "b1": {7}, "b2": {7}}, False),
        (None, {"a1": {8}, "a2": {7}, "b1": {7}, "b2": {7}}, False),
        (None, {"a1": {7}, "b1": {7}, "b2": {7}}, False),
    ],
)
def test_each_reward_is_joined_to_its_request_and_worker(missing, served, passed):
    batch = score_conversations([conversation("a"), conversation("b")], GRPO)
    records = list(conversation_records(batch, "run", 1, 4, 2))
    attempts = [attempt(name, "retried" if name == missing else "accepted") for name in ("a1", "a2", "b1", "b2")]
    checks = Checklist()
    check_rewards_joined(checks, records, attempts, served)
    assert [check.passed for check in checks.checks] == [passed]
    doubled = Checklist()
    check_rewards_joined(doubled, [*records, records[0]], attempts, served)
    assert not doubled.passed

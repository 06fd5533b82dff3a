"""Prompts are the same for the same seed and step; rewards judge the token IDs."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from functional.suite.model import tiny_tokenizer, wide_tokenizer
from functional.suite.tasks import ArithmeticTask, QuestionTask, TokenSetTask, arithmetic, make_task

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>")


def test_arithmetic_is_right():
    questions = arithmetic()
    assert len(questions) == len({q.prompt for q in questions}) == 155
    for question in questions:
        assert str(eval(question.prompt.rstrip("="))) == question.answer
        assert not question.answer.startswith("-")


def test_prompts_depend_on_seed_and_step_alone(tokenizer):
    first, again = ArithmeticTask(tokenizer, 8, seed=1), ArithmeticTask(tokenizer, 8, seed=1)
    assert first.prompts(3) == again.prompts(3) == first.prompts(3)
    assert first.prompts(3) != first.prompts(4)
    assert first.prompts(3) != ArithmeticTask(tokenizer, 8, seed=2).prompts(3)
    assert len({p.text for p in first.prompts(3)}) == 8


def test_reward_wants_exactly_the_answer(tokenizer):
    task = ArithmeticTask(tokenizer, 155, seed=0)
    prompt = next(p for p in task.prompts(0) if p.text == "7+5=")
    assert tokenizer.decode(list(prompt.token_ids)) == "7+5="
    for said, reward in (
        ("12<|im_end|>", 1),
        ("12", 1),
        (" 12\n<|im_end|>", 1),
        ("1<|im_end|>", 0),
        ("120", 0),
        ("", 0),
    ):
        assert task.reward(prompt, tokenizer.encode(said, add_special_tokens=False), "ignored") == reward, said


def test_token_set_counts_its_share():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wide_tokenizer(151936))
    task = TokenSetTask(tokenizer, 4, seed=0)
    prompts = task.prompts(0)
    assert len({p.token_ids for p in prompts}) == 4
    assert task.reward(prompts[0], [2, 4, 5, 7], "") == 0.5
    assert task.reward(prompts[0], [], "") == 0
    assert TokenSetTask(tokenizer, 4, seed=0, modulus=5).reward(prompts[0], [5, 1, 2, 3], "") == 0.25


def test_questions_of_a_local_file(tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"say {i}:", "answer": str(i)} for i in range(3)]
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    task = make_task(str(path), tokenizer, 3, seed=0)
    assert isinstance(task, QuestionTask)
    prompts = task.prompts(0)
    assert sorted(p.text for p in prompts) == ["say 0:", "say 1:", "say 2:"]
    assert task.reward(prompts[0], tokenizer.encode(str(prompts[0].answer), add_special_tokens=False), "") == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "not JSON"),
        ('{"prompt": "a"}', "two strings"),
        ("[]", "two strings"),
        ('{"prompt":"","answer":"x"}', "empty"),
    ],
)
def test_a_bad_line_is_named(tokenizer, tmp_path, line, complaint):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl:2: .*{complaint}"):
        make_task(str(path), tokenizer, 1, seed=0)


def test_unknown_tasks_and_sizes_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="unknown task 'chess'"):
        make_task("chess", tokenizer, 1, seed=0)
    with pytest.raises(ValueError, match="no such data file"):
        make_task(str(tmp_path / "none.jsonl"), tokenizer, 1, seed=0)
    with pytest.raises(ValueError, match="1 to 155"):
        make_task("arithmetic", tokenizer, 156, seed=0)

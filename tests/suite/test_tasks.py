"""Prompts are the same for the same seed and step; rewards judge the token IDs."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from functional.suite.tasks import (
    ArithmeticTask,
    Question,
    QuestionTask,
    TokenSetTask,
    arithmetic,
    longest_prompt,
    make_task,
    read_questions,
)
from functional.suite.vocabulary import tiny_tokenizer, wide_tokenizer

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
        assert task.reward(prompt, tokenizer.encode(said, add_special_tokens=False)) == reward, said


def test_token_set_counts_its_share():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wide_tokenizer(151936))
    task = TokenSetTask(tokenizer, 4, seed=0)
    prompts = task.prompts(0)
    assert len({p.token_ids for p in prompts}) == 4
    assert task.reward(prompts[0], [2, 4, 5, 7]) == 0.5
    assert task.reward(prompts[0], []) == 0
    assert TokenSetTask(tokenizer, 4, seed=0, modulus=5).reward(prompts[0], [5, 1, 2, 3]) == 0.25


def test_questions_of_a_local_file(tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"say {i}:", "answer": str(i)} for i in range(3)]
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    task = make_task(str(path), tokenizer, 3, seed=0)
    assert isinstance(task, QuestionTask)
    prompts = task.prompts(0)
    assert sorted(p.text for p in prompts) == ["say 0:", "say 1:", "say 2:"]
    assert task.reward(prompts[0], tokenizer.encode(str(prompts[0].answer), add_special_tokens=False)) == 1


@pytest.mark.parametrize("code", [0x2028, 0x2029, 0x85, 0x1F600, 0xFEFF])
def test_only_a_newline_ends_a_line(tmp_path, code):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"one{chr(code)}two {i}", "answer": "3"} for i in range(3)]
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8", newline="")
    assert [q.prompt for q in read_questions(path)] == [r["prompt"] for r in rows]


def test_a_byte_order_mark_carriage_returns_and_blank_lines_are_tolerated_and_lines_counted(tmp_path):
    path = tmp_path / "data.jsonl"
    row = json.dumps({"prompt": "a\u000b\u001c", "answer": "b"}).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n \t\r\n\n" + row)
    assert [(q.prompt, q.place) for q in read_questions(path)] == [
        ("a\x0b\x1c", f"{path}:1"),
        ("a\x0b\x1c", f"{path}:4"),
    ]


GOOD = b'{"prompt": "a", "answer": "b"}'
BAD_LINES = [
    (b"nonsense", "not JSON: Expecting value at character 1"),
    (GOOD + GOOD, "not JSON: Extra data at character 31"),
    (GOOD + b"\r" + GOOD, "not JSON: Extra data"),
    (b"\xef\xbb\xbf" + GOOD, "not JSON: .*BOM"),
    (b"\x0c", "not JSON"),
    (b'{"prompt": "a\x0bb", "answer": "c"}', "not JSON: Invalid control character at character 14"),
    (b"[" * 100_000, "not JSON that can be read"),
    (b"[" + b"1" * 10_000 + b"]", "not JSON that can be read"),
    (b"\xff\xfe{", "not UTF-8: invalid start byte at byte 1 of the line"),
    (b'{"prompt": "caf\xe9", "answer": "x"}', "not UTF-8: .* at byte 16 of the line"),
    (b"[]", "found list"),
    (b"null", "found NoneType"),
    (b'{"prompt": "a"}', "the answer is missing"),
    (b'{"answer": "a"}', "the prompt is missing"),
    (b'{"prompt": null, "answer": "a"}', "the prompt must be a string, found null"),
    (b'{"prompt": "1+1=", "answer": 2}', "the answer must be a string, found 2"),
    (b'{"prompt": "", "answer": "x"}', "the prompt is empty"),
    (b'{"prompt": "a", "prompt": "b", "answer": "x"}', "the key 'prompt' stands there twice"),
    (b'{"prompt": "a", "answer": "x", "more": {"k": 1, "k": 2}}', "the key 'k' stands there twice"),
    (b'{"prompt": "\\ud83d", "answer": "x"}', "the prompt holds half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES, ids=[complaint[:24] for _, complaint in BAD_LINES])
def test_a_bad_line_is_named(tokenizer, tmp_path, line, complaint):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl:2: .*{complaint}") as refusal:
        make_task(str(path), tokenizer, 1, seed=0)
    assert len(str(refusal.value)) < 300 + len(str(path))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_questions_is_refused(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.jsonl: no questions in it"):
        read_questions(path)


def test_prompts_are_measured_and_one_that_fills_the_context_is_named(tokenizer):
    questions = [Question("1" * length, "1", f"q.jsonl:{length}") for length in (3, 7, 5)]
    assert longest_prompt(tokenizer, questions, 8) == 7
    with pytest.raises(ValueError, match=r"^q\.jsonl:7: the prompt has 7 tokens.*max_model_len=7$"):
        longest_prompt(tokenizer, questions, 7)
    with pytest.raises(ValueError, match=r"^q\.jsonl:7: .*max_model_len=5 \(and 1 more such prompts\)$"):
        longest_prompt(tokenizer, questions, 5)


def test_a_prompt_without_tokens_is_named():
    class Mute:
        def encode(self, text, *, add_special_tokens):
            return []

    with pytest.raises(ValueError, match=r"^q\.jsonl:3: prompt 'x' has no tokens$"):
        longest_prompt(Mute(), [Question("x", "y", "q.jsonl:3")], 8)


def test_unknown_tasks_and_sizes_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="unknown task 'chess'"):
        make_task("chess", tokenizer, 1, seed=0)
    with pytest.raises(ValueError, match="no such file"):
        make_task(str(tmp_path / "none.jsonl"), tokenizer, 1, seed=0)
    with pytest.raises(ValueError, match="1 to 155"):
        make_task("arithmetic", tokenizer, 156, seed=0)

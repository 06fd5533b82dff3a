"""What the policy is asked, and what an answer is worth: prompts as token IDs, rewards from completion token IDs."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from functional.runtime.recipe.paths import find_file_problem

KEYS = ("prompt", "answer")
"""What holds a question in a line of a file, unless the recipe names other keys."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that tasks use."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """One question. token_ids is what the engine is sent; answer is None where the reward needs none."""

    text: str
    token_ids: tuple[int, ...]
    answer: str | None


class Task(Protocol):
    """The seam between the driver and a task."""

    def prompts(self, step: int) -> list[Prompt]:
        """The step's prompts, distinct, the same for the same seed and step."""
        ...

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> float:
        """What the completion is worth, judged by its token IDs."""
        ...


@dataclass(frozen=True)
class Question:
    """A prompt's text and its only right answer. place: where it stands, as `FILE:LINE`."""

    prompt: str
    answer: str
    place: str = field(default="", compare=False)


def arithmetic() -> list[Question]:
    """All sums and all differences (none below zero) of two one-digit numbers, as `3+4=` and `7`: 155 questions."""
    sums = [Question(f"{a}+{b}=", str(a + b), "arithmetic") for a in range(10) for b in range(10)]
    differences = [Question(f"{a}-{b}=", str(a - b), "arithmetic") for a in range(10) for b in range(a + 1)]
    return sums + differences


def read_questions(path: Path, keys: tuple[str, str] = KEYS) -> list[Question]:
    """Questions of a JSON Lines file of {"prompt": str, "answer": str}, or of other keys: UTF-8, a byte order mark in
    front tolerated.

    Raises ValueError naming the bad line.
    """
    questions = [
        Question(prompt, answer, f"{path}:{number}")
        for number, line in numbered_lines(path)
        for prompt, answer in [read_question(line, f"{path}:{number}", keys)]
    ]
    if not questions:
        raise ValueError(f"{path}: no questions in it")
    return questions


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of the lines that are not blank. A newline alone ends a line: the separators that
    `str.splitlines` knows besides (U+2028, U+0085 and others) may stand in a JSON string."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip(b" \t\r\n"):
                yield number, line


def read_question(line: bytes, place: str, keys: tuple[str, str] = KEYS) -> tuple[str, str]:
    """(prompt, answer). Raises ValueError that begins with `place`."""
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=refuse_repeated_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8: {error.reason} at byte {error.start + 1} of the line") from None
    except RepeatedKeyError as error:
        raise ValueError(f"{place}: the key {error.args[0]!r} stands there twice") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg.removesuffix(' at')} at character {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON that can be read: {error}") from None
    if not isinstance(row, dict):
        wanted = ", ".join(f'"{key}": "…"' for key in keys)
        raise ValueError(f"{place}: want {{{wanted}}}, found {type(row).__name__}")
    for key in keys:
        if key not in row:
            raise ValueError(f"{place}: the {key} is missing")
        if not isinstance(row[key], str):
            raise ValueError(f"{place}: the {key} must be a string, found {json.dumps(row[key])[:60]}")
        if any("\ud800" <= character <= "\udfff" for character in row[key]):
            raise ValueError(f"{place}: the {key} holds half of a surrogate pair, which is no text")
    prompt, answer = (row[key] for key in keys)
    if not prompt:
        raise ValueError(f"{place}: the {keys[0]} is empty")
    return prompt, answer.strip()


class RepeatedKeyError(Exception):
    """The key that an object has twice."""


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its members. Raises RepeatedKeyError for a key that is there twice."""
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise RepeatedKeyError(key)
        row[key] = value
    return row


class QuestionTask:
    """Questions with one right answer: reward 1 when the completion, decoded and stripped, is exactly it, else 0."""

    def __init__(self, tokenizer: Tokenizer, questions: Sequence[Question], num_prompts: int, seed: int) -> None:
        if not 0 < num_prompts <= len(questions):
            raise ValueError(f"num_prompts_per_step must be 1 to {len(questions)} for this data, not {num_prompts}")
        self.tokenizer = tokenizer
        self.questions = list(questions)
        self.num_prompts = num_prompts
        self.seed = seed

    def prompts(self, step: int) -> list[Prompt]:
        drawn = step_random(self.seed, step).sample(self.questions, self.num_prompts)
        return [Prompt(q.prompt, encode(self.tokenizer, q.prompt), q.answer) for q in drawn]

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> float:
        said = self.tokenizer.decode(list(completion_ids), skip_special_tokens=True)
        return float(said.strip() == prompt.answer)


class ArithmeticTask(QuestionTask):
    """One-digit sums and differences: what the embedded model was taught."""

    def __init__(self, tokenizer: Tokenizer, num_prompts: int, seed: int) -> None:
        super().__init__(tokenizer, arithmetic(), num_prompts, seed)


class TokenSetTask:
    """Reward: the share of completion tokens in a fixed set, the IDs divisible by `modulus`.

    Even with random weights it differs from sample to sample: with T tokens its standard deviation is about
    sqrt((1 - 1/modulus) / modulus / T).
    """

    def __init__(self, tokenizer: Tokenizer, num_prompts: int, seed: int, modulus: int = 2) -> None:
        if modulus < 2 or num_prompts < 1:
            raise ValueError(f"want modulus >= 2 and num_prompts_per_step >= 1, not {modulus} and {num_prompts}")
        self.tokenizer = tokenizer
        self.num_prompts = num_prompts
        self.seed = seed
        self.modulus = modulus

    def prompts(self, step: int) -> list[Prompt]:
        numbers = step_random(self.seed, step).sample(range(1_000_000), self.num_prompts)
        return [Prompt(text, encode(self.tokenizer, text), None) for text in map(token_set_prompt, numbers)]

    def reward(self, prompt: Prompt, completion_ids: Sequence[int]) -> float:
        if not completion_ids:
            return 0.0
        return sum(i % self.modulus == 0 for i in completion_ids) / len(completion_ids)


def token_set_prompt(number: int) -> str:
    """The text of a prompt of `token_set`."""
    return f"Write anything you like about the number {number}."


def make_task(
    name: str, tokenizer: Any, num_prompts: int, seed: int, keys: tuple[str, str] = KEYS, held: float = 0
) -> Task:
    """The task called "arithmetic" or "token_set", or the questions of the local .jsonl file at that path.

    num_prompts: prompts a step; held: the share of the questions that is not trained on. Raises ValueError for another
    name, a broken file, or more prompts than questions.
    """
    if name == "arithmetic" and not held:
        return ArithmeticTask(tokenizer, num_prompts, seed)
    if name == "token_set":
        return TokenSetTask(tokenizer, num_prompts, seed)
    if name == "arithmetic":
        return QuestionTask(tokenizer, held_out(arithmetic(), held, seed)[0], num_prompts, seed)
    if not name.endswith(".jsonl"):
        raise ValueError(f"unknown task {name!r}: want arithmetic, token_set or the path of a .jsonl file")
    if problem := find_file_problem(name):
        raise ValueError(f"{name}: {problem}")
    return QuestionTask(tokenizer, held_out(read_questions(Path(name), keys), held, seed)[0], num_prompts, seed)


def held_out(questions: Sequence[Question], size: float, seed: int) -> tuple[list[Question], list[Question]]:
    """Questions to train on, and the share `size` of them that is kept for validation: the same for the same seed."""
    shuffled = random.Random(f"{seed}/validation").sample(questions, len(questions))
    count = round(size * len(questions))
    kept = set(map(id, shuffled[:count]))
    return [question for question in questions if id(question) not in kept], shuffled[:count]


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The text's token IDs, no special tokens added. Raises ValueError if there are none."""
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not ids:
        raise ValueError(f"prompt {text!r} has no tokens")
    return ids


def longest_prompt(tokenizer: Tokenizer, questions: Sequence[Question], max_model_len: int) -> int:
    """Tokens of the longest prompt.

    Raises ValueError naming the first prompt that has no tokens, or leaves no room for one more in a context of
    `max_model_len`.
    """
    longest, too_long = 0, []
    for question in questions:
        try:
            count = len(encode(tokenizer, question.prompt))
        except ValueError as error:
            raise ValueError(f"{question.place}: {error}") from None
        longest = max(longest, count)
        if count >= max_model_len:
            too_long.append((question, count))
    if too_long:
        question, count = too_long[0]
        more = f" (and {len(too_long) - 1} more such prompts)" if len(too_long) > 1 else ""
        raise ValueError(
            f"{question.place}: the prompt has {count} tokens, which leaves no room for an answer in "
            f"policy.generation.vllm_cfg.max_model_len={max_model_len}{more}"
        )
    return longest


def step_random(seed: int, step: int) -> random.Random:
    """A generator of its own for each seed and step (seeding by a string is stable across Python versions)."""
    return random.Random(f"{seed}/{step}")

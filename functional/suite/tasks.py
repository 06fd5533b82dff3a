"""What the policy is asked, and what an answer is worth: prompts as token IDs, rewards from completion token IDs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


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

    def reward(self, prompt: Prompt, completion_ids: Sequence[int], text: str) -> float:
        """The completion's worth. text is the engine's own decoding; the tasks here judge the token IDs instead."""
        ...


@dataclass(frozen=True)
class Question:
    """A prompt's text and its only right answer."""

    prompt: str
    answer: str


def arithmetic() -> list[Question]:
    """All sums and all differences (none below zero) of two one-digit numbers, as `3+4=` and `7`: 155 questions."""
    sums = [Question(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
    differences = [Question(f"{a}-{b}=", str(a - b)) for a in range(10) for b in range(a + 1)]
    return sums + differences


def read_questions(path: Path) -> list[Question]:
    """Questions of a JSON Lines file of {"prompt": str, "answer": str}. Raises ValueError naming the bad line."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in ("prompt", "answer")):
            raise ValueError(f'{path}:{number}: want {{"prompt": "…", "answer": "…"}} with two strings')
        if not row["prompt"]:
            raise ValueError(f"{path}:{number}: the prompt is empty")
        questions.append(Question(row["prompt"], row["answer"].strip()))
    if not questions:
        raise ValueError(f"{path}: no questions in it")
    return questions


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

    def reward(self, prompt: Prompt, completion_ids: Sequence[int], text: str) -> float:
        said = self.tokenizer.decode(list(completion_ids), skip_special_tokens=True)
        return float(said.strip() == prompt.answer)


class ArithmeticTask(QuestionTask):
    """One-digit sums and differences: what `make_model` teaches."""

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
        texts = [f"Write anything you like about the number {n}." for n in numbers]
        return [Prompt(text, encode(self.tokenizer, text), None) for text in texts]

    def reward(self, prompt: Prompt, completion_ids: Sequence[int], text: str) -> float:
        if not completion_ids:
            return 0.0
        return sum(i % self.modulus == 0 for i in completion_ids) / len(completion_ids)


def make_task(name: str, tokenizer: Any, num_prompts: int, seed: int) -> Task:
    """The task called "arithmetic" or "token_set", or the questions of the local .jsonl file at that path."""
    if name == "arithmetic":
        return ArithmeticTask(tokenizer, num_prompts, seed)
    if name == "token_set":
        return TokenSetTask(tokenizer, num_prompts, seed)
    path = Path(name)
    if path.suffix != ".jsonl":
        raise ValueError(f"unknown task {name!r}: want arithmetic, token_set or the path of a .jsonl file")
    if not path.is_file():
        raise ValueError(f"no such data file: {path}")
    return QuestionTask(tokenizer, read_questions(path), num_prompts, seed)


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The text's token IDs, no special tokens added. Raises ValueError if there are none."""
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not ids:
        raise ValueError(f"prompt {text!r} has no tokens")
    return ids


def step_random(seed: int, step: int) -> random.Random:
    """A generator of its own for each seed and step (seeding by a string is stable across Python versions)."""
    return random.Random(f"{seed}/{step}")

"""Which data a run draws its prompts from, and what of it the report keeps: name, number of questions, hash."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.rules import TOOL_DATA
from functional.suite.tasks import (
    KEYS,
    Question,
    Tokenizer,
    arithmetic,
    longest_prompt,
    read_questions,
    token_set_prompt,
)
from functional.suite.tool_questions import tool_questions

TOKEN_SET_NUMBERS = (100_000, 123_456, 999_999)
"""As many digits as there are: they stand for all prompts of `token_set` where these are measured."""


@dataclass(frozen=True)
class DataRecord:
    """sha256: of the file's bytes, or of a built-in set's questions as JSON lines; None where prompts are made anew.

    longest_prompt: in tokens; None where the model's tokenizer is not on this machine, and for conversations.
    """

    dataset_name: str
    source: str
    questions: int | None
    sha256: str | None
    longest_prompt: int | None = None


def measure_data(recipe: Recipe, tokenizer: Tokenizer | None) -> DataRecord:
    """The recipe's data, its prompts measured where there is a tokenizer. Raises ConfigError (describe_data)."""
    context = recipe.policy.generation.vllm_cfg.max_model_len
    prompts, keys = recipe.grpo.num_prompts_per_step, recipe.data.keys
    return describe_data(recipe.data.dataset_name, prompts, tokenizer, context, keys)


def describe_data(
    name: str,
    num_prompts: int,
    tokenizer: Tokenizer | None = None,
    max_model_len: int = 0,
    keys: tuple[str, str] = KEYS,
) -> DataRecord:
    """Read the data of `data.dataset_name`, measure its prompts where there is a tokenizer, and say what it is.

    Raises ConfigError naming a bad line or a prompt that fills the context, or when there are fewer questions than
    `num_prompts`, a step's.
    """
    record, questions = read_data(name, keys)
    if tokenizer is not None and questions:
        record = replace(record, longest_prompt=measure(name, questions, tokenizer, max_model_len))
    check_count(record, num_prompts)
    return record


def read_data(name: str, keys: tuple[str, str] = KEYS) -> tuple[DataRecord, list[Question]]:
    """What the data is, not measured, and the questions that prompts are drawn from (or examples of them).

    Raises ConfigError naming a bad line.
    """
    try:
        return _read(name, keys)
    except (OSError, ValueError) as error:
        raise _bad_data(name, error) from error


def measure(name: str, questions: list[Question], tokenizer: Tokenizer, max_model_len: int) -> int:
    """Tokens of the longest prompt. Raises ConfigError naming one that fills the context."""
    try:
        return longest_prompt(tokenizer, questions, max_model_len)
    except ValueError as error:
        raise _bad_data(name, error) from error


def check_count(record: DataRecord, num_prompts: int, held: float = 0) -> None:
    """Raises ConfigError when there are fewer questions than `num_prompts`, a step's. held: the share that is not
    trained on."""
    if record.questions is None:
        return
    left = record.questions - round(held * record.questions)
    if left < num_prompts:
        apart = f", {record.questions - left} held out (data.split_validation_size)" if held else ""
        there = f"{record.dataset_name} holds {left} questions only{apart}"
        raise ConfigError(f"grpo.num_prompts_per_step={num_prompts}: {there}")


def _bad_data(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"data.dataset_name={name!r}: {' '.join(str(error).split())}")


def _read(name: str, keys: tuple[str, str]) -> tuple[DataRecord, list[Question]]:
    if name == "arithmetic":
        questions = arithmetic()
        lines = [json.dumps({"answer": q.answer, "prompt": q.prompt}, sort_keys=True) for q in questions]
        return DataRecord(name, "built in", len(lines), _sha256("\n".join(lines).encode())), questions
    if name == TOOL_DATA:
        lines = [json.dumps({"answer": q.answer, "prompt": q.text}, sort_keys=True) for q in tool_questions()]
        # How long a conversation's prompts are depends on what is answered; each turn is refused as it comes.
        return DataRecord(name, "built in", len(lines), _sha256("\n".join(lines).encode())), []
    if name == "token_set":
        examples = [Question(token_set_prompt(number), "", "token_set") for number in TOKEN_SET_NUMBERS]
        return DataRecord(name, "made from grpo.seed", None, None), examples
    questions = read_questions(Path(name), keys)
    return DataRecord(name, "file", len(questions), _sha256(Path(name).read_bytes())), questions


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

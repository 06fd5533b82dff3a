"""A recipe for a run: its keys, the runtime's rules, and what the suite wants of the data, all judged together."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from functional.runtime.architectures import find_model_problem
from functional.runtime.config import Recipe, load_recipe
from functional.runtime.errors import ConfigError
from functional.runtime.paths import find_file_problem, is_folder
from functional.runtime.rules import BUILTIN_DATA, RULES, Problem, UnreadKeyError
from functional.suite.data import check_count, measure, read_data
from functional.suite.models import find_tokenizer


def load_for_run(path: Path, overrides: list[str]) -> Recipe:
    """As `load_recipe`; the error names what is wrong with the model's tokenizer and with the data too."""
    return load_recipe(path, overrides, rules=(*RULES, _prompts))


def _prompts(recipe: Recipe) -> Iterator[Problem]:
    """Tokenizer, data, their number and their length: each is judged as far as the keys for it can be read."""
    tokenizer: Any = None
    with suppress(UnreadKeyError):
        try:
            tokenizer = find_tokenizer(recipe.policy.model_name)
        except ConfigError as error:
            if not _is_refused(recipe.policy.model_name):
                yield _problem("policy.model_name", recipe.policy.model_name, error)
    name = recipe.data.dataset_name
    if name not in BUILTIN_DATA and (not name.endswith(".jsonl") or find_file_problem(name)):
        return  # a rule of the runtime says so
    try:
        record, questions = read_data(name)
    except ConfigError as error:
        yield _problem("data.dataset_name", name, error)
        return
    with suppress(UnreadKeyError):
        try:
            check_count(record, recipe.grpo.num_prompts_per_step)
        except ConfigError as error:
            yield _problem("grpo.num_prompts_per_step", recipe.grpo.num_prompts_per_step, error)
    if tokenizer is not None:
        try:
            measure(name, questions, tokenizer, recipe.policy.generation.vllm_cfg.max_model_len)
        except ConfigError as error:
            yield _problem("data.dataset_name", name, error)


def _is_refused(model: str) -> bool:
    """Whether a rule of the runtime refuses the model's folder already."""
    return is_folder(model) and find_model_problem(Path(model) / "config.json") is not None


def _problem(key: str, value: Any, error: ConfigError) -> Problem:
    return Problem(key, value, str(error).removeprefix(f"{key}={value!r}: "))

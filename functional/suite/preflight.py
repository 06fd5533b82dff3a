"""A recipe for a run: its keys, the runtime's rules, and what the suite wants of the data, all judged together."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.load import load_recipe
from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.rules import BUILTIN_DATA, RULES, Problem
from functional.suite.data import measure_data
from functional.suite.models import find_tokenizer


def load_for_run(path: Path, overrides: list[str]) -> Recipe:
    """As `load_recipe`; the error names what is wrong with the data too."""
    return load_recipe(path, overrides, rules=(*RULES, _data))


def _data(recipe: Recipe) -> Iterator[Problem]:
    name, prompts = recipe.data.dataset_name, recipe.grpo.num_prompts_per_step
    if name not in BUILTIN_DATA and not (name.endswith(".jsonl") and Path(name).is_file()):
        return  # a rule of the runtime says so
    try:
        measure_data(recipe, find_tokenizer(recipe.policy.model_name))
    except ConfigError as error:
        values = {"policy.model_name": recipe.policy.model_name, "data.dataset_name": name}
        yield _as_problem(str(error), values | {"grpo.num_prompts_per_step": prompts})


def _as_problem(error: str, values: dict[str, Any]) -> Problem:
    """An error that begins with `KEY=VALUE: `, the key one of `values`; any other is of the model's files."""
    for key, value in values.items():
        if error.startswith(f"{key}={value!r}: "):
            return Problem(key, value, error.removeprefix(f"{key}={value!r}: "))
    return Problem("policy.model_name", values["policy.model_name"], error)

"""A recipe for a run: its keys, the runtime's rules, and what the suite wants of the data, all judged together."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from functional.runtime.config import Recipe, load_recipe
from functional.runtime.errors import ConfigError
from functional.runtime.rules import BUILTIN_DATA, RULES, Problem
from functional.suite.data import describe_data


def load_for_run(path: Path, overrides: list[str]) -> Recipe:
    """As `load_recipe`; the error names what is wrong with the data too."""
    return load_recipe(path, overrides, rules=(*RULES, _data))


def _data(recipe: Recipe) -> Iterator[Problem]:
    name, prompts = recipe.data.dataset_name, recipe.grpo.num_prompts_per_step
    if name not in BUILTIN_DATA and not (name.endswith(".jsonl") and Path(name).is_file()):
        return  # a rule of the runtime says so
    try:
        describe_data(name, prompts)
    except ConfigError as error:
        yield _as_problem(str(error), {"data.dataset_name": name, "grpo.num_prompts_per_step": prompts})


def _as_problem(error: str, values: dict[str, Any]) -> Problem:
    """An error that begins with `KEY=VALUE: `, the key one of `values`."""
    key = next(key for key in values if error.startswith(f"{key}={values[key]!r}: "))
    return Problem(key, values[key], error.removeprefix(f"{key}={values[key]!r}: "))

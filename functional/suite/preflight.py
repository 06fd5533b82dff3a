"""A recipe for a run: its keys, the runtime's rules, and what the suite wants of the data, all judged together."""

from collections.abc import Iterator
from pathlib import Path

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
        for key, value in (("data.dataset_name", name), ("grpo.num_prompts_per_step", prompts)):
            message = str(error).removeprefix(f"{key}={value!r}: ")
            if message != str(error):
                yield Problem(key, value, message)
                return
        raise

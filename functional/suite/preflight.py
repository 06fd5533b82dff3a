"""A recipe for a run: its keys, the runtime's rules, and what the suite wants of the data, all judged together."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.architectures import find_model_problem
from functional.runtime.recipe.load import load_recipe
from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.rules import BUILTIN_DATA, RULES, Problem
from functional.suite.data import DataRecord, measure_data
from functional.suite.models import find_tokenizer


@dataclass(frozen=True)
class Prepared:
    """A recipe that may run, and what was read to find that out. `tokenizer`: None for a hub model that is not on this
    machine yet, whose prompts are then not measured."""

    recipe: Recipe
    tokenizer: Any | None
    data: DataRecord


class DataRule:
    """The rule that the data must be readable and fit the model; it keeps what it has read of the last recipe."""

    def __init__(self) -> None:
        self.tokenizer: Any | None = None
        self.data: DataRecord | None = None

    def __call__(self, recipe: Recipe) -> Iterator[Problem]:
        name, prompts = recipe.data.dataset_name, recipe.grpo.num_prompts_per_step
        if name not in BUILTIN_DATA and not (name.endswith(".jsonl") and Path(name).is_file()):
            return  # a rule of the runtime says so
        model = recipe.policy.model_name
        try:
            self.tokenizer = find_tokenizer(model)
        except ConfigError as error:  # the data can be read all the same, without measuring its prompts
            self.tokenizer = None
            is_refused = Path(model).is_dir() and find_model_problem(Path(model) / "config.json") is not None
            if not is_refused:  # else a rule of the runtime has said why
                yield _as_problem(str(error), {"policy.model_name": model})
        try:
            self.data = measure_data(recipe, self.tokenizer)
        except ConfigError as error:
            values = {"data.dataset_name": name, "grpo.num_prompts_per_step": prompts}
            yield _as_problem(str(error), values | {"policy.model_name": model})


def prepare(path: Path, overrides: list[str]) -> Prepared:
    """Load the recipe at `path` with dot-list `overrides`, its tokenizer and its data's record.

    Raises ConfigError as `load_recipe` does; it names what is wrong with the data too.
    """
    rule = DataRule()
    recipe = load_recipe(path, overrides, rules=(*RULES, rule))
    if rule.data is None:  # the file was there when the runtime's rule looked, and gone when ours did
        raise ConfigError(f"data.dataset_name={recipe.data.dataset_name!r}: no such file")
    return Prepared(recipe, rule.tokenizer, rule.data)


def _as_problem(error: str, values: dict[str, Any]) -> Problem:
    """An error that begins with `KEY=VALUE: `, the key one of `values`; any other is of the model's files."""
    for key, value in values.items():
        if error.startswith(f"{key}={value!r}: "):
            return Problem(key, value, error.removeprefix(f"{key}={value!r}: "))
    return Problem("policy.model_name", values["policy.model_name"], error)

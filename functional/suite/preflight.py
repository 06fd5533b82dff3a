"""A recipe for a run: keys, the runtime's rules, and what the suite wants of model and data, all judged together."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.architectures import find_model_problem, longest_context
from functional.runtime.recipe.load import load_recipe
from functional.runtime.recipe.model import GenerationConfig, Recipe, UnreadKeyError
from functional.runtime.recipe.options import VLLM_CFG
from functional.runtime.recipe.paths import find_file_problem, is_folder
from functional.runtime.recipe.rules import BUILTIN_DATA, RULES, Problem, layout_problems
from functional.suite.data import DataRecord, check_count, measure, read_data
from functional.suite.models import BUILTIN, embedded_dir, find_tokenizer, known_config


@dataclass(frozen=True)
class Prepared:
    """A recipe that may run, and what was read to find that out. `tokenizer`: None for a hub model that is not on this
    machine yet, whose prompts are then not measured."""

    recipe: Recipe
    tokenizer: Any | None
    data: DataRecord


def prepare(path: Path, overrides: list[str]) -> Prepared:
    """Load the recipe at `path` with dot-list `overrides`, its tokenizer and its data's record.

    Raises ConfigError as `load_recipe` does; it names what is wrong with the model's tokenizer and with the data too.
    """
    rule = DataRule()
    recipe = load_recipe(path, overrides, rules=(*RULES, _builtin_layout, _context, _compiler, rule))
    if rule.data is None:  # the file was there when the runtime's rule looked, and gone when ours did
        raise ConfigError(f"data.dataset_name={recipe.data.dataset_name!r}: no such file")
    return Prepared(recipe, rule.tokenizer, rule.data)


class DataRule:
    """The rule on tokenizer, data, their number and their length: each is judged as far as the keys for it can be read.

    It keeps what it has read of the last recipe.
    """

    def __init__(self) -> None:
        self.tokenizer: Any | None = None
        self.data: DataRecord | None = None

    def __call__(self, recipe: Recipe) -> Iterator[Problem]:
        with suppress(UnreadKeyError):
            yield from self._tokenizer(recipe.policy.model_name)
        with suppress(UnreadKeyError):
            yield from self._validation(recipe)
        name = recipe.data.dataset_name
        if not _is_readable(name):
            return
        try:
            self.data, questions = read_data(name, recipe.data.keys)
        except ConfigError as error:
            yield _problem("data.dataset_name", name, error)
            return
        with suppress(UnreadKeyError):
            yield from _count(self.data, recipe.grpo.num_prompts_per_step, recipe.data.split_validation_size)
        if self.tokenizer is not None and questions:
            context = recipe.policy.generation.vllm_cfg.max_model_len
            try:
                self.data = replace(self.data, longest_prompt=measure(name, questions, self.tokenizer, context))
            except ConfigError as error:
                yield _problem("data.dataset_name", name, error)

    def _validation(self, recipe: Recipe) -> Iterator[Problem]:
        source, context = recipe.data.validation, recipe.policy.generation.vllm_cfg.max_model_len
        if source is None or not _is_readable(source.dataset_name):
            return
        try:
            _, questions = read_data(source.dataset_name, source.keys)
            if self.tokenizer is not None:
                measure(source.dataset_name, questions, self.tokenizer, context)
        except ConfigError as error:
            words = str(error).removeprefix(f"data.dataset_name={source.dataset_name!r}: ")
            yield Problem("data.validation.dataset_name", source.dataset_name, words)

    def _tokenizer(self, model: str) -> Iterator[Problem]:
        try:
            self.tokenizer = find_tokenizer(model)
        except ConfigError as error:
            self.tokenizer = None
            if not _is_refused(model):  # else a rule of the runtime has said why
                yield _problem("policy.model_name", model, error)


def _is_readable(name: str) -> bool:
    """Whether there are such questions; if not, a rule of the runtime says so."""
    return name in BUILTIN_DATA or (name.endswith(".jsonl") and not find_file_problem(name))


def _count(record: DataRecord, prompts: int, held: float) -> Iterator[Problem]:
    try:
        check_count(record, prompts, held)
    except ConfigError as error:
        yield _problem("grpo.num_prompts_per_step", prompts, error)


def _builtin_layout(recipe: Recipe) -> Iterator[Problem]:
    """As the runtime judges a model's folder, of a model that is made on the spot."""
    if recipe.policy.model_name in BUILTIN:
        yield from layout_problems(recipe, known_config(recipe.policy.model_name))


def _context(recipe: Recipe) -> Iterator[Problem]:
    """vLLM refuses a longer context than the model's, but only once a worker starts."""
    name, generation = recipe.policy.model_name, recipe.policy.generation
    folder = embedded_dir(name) or Path(name)
    wanted = generation.vllm_cfg.max_model_len
    if not is_folder(str(folder)) or _is_refused(str(folder)):
        return
    longest = longest_context(folder / "config.json")
    if longest is not None and wanted > longest and not _is_stretched(generation):
        message = f"the model takes {longest} positions (max_position_embeddings): set no more"
        yield Problem(f"{VLLM_CFG}.max_model_len", wanted, message)


def _compiler(recipe: Recipe) -> Iterator[Problem]:
    """vLLM compiles the model, through torch's Inductor, unless it is told otherwise; a worker that cannot ends after a
    minute. Both environments are of the Python that runs this."""
    generation = recipe.policy.generation
    if generation.vllm_cfg.enforce_eager or "compilation_config" in generation.vllm_kwargs.entries():
        return
    compiler, header = os.environ.get("CXX", "g++"), Path(sysconfig.get_path("include")) / "Python.h"
    missing = [what for what, there in ((compiler, shutil.which(compiler)), (header, header.exists())) if not there]
    if missing:
        message = f"vLLM would compile the model, and {' and '.join(map(str, missing))} is not here: set it to true"
        yield Problem(f"{VLLM_CFG}.enforce_eager", False, message)


def _is_stretched(generation: GenerationConfig) -> bool:
    """Whether the recipe has the engine take more positions, or alters the model's configuration."""
    if "hf_overrides" in generation.vllm_kwargs.entries():
        return True
    return generation.vllm_cfg.env_vars.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip() == "1"


def _is_refused(model: str) -> bool:
    """Whether a rule of the runtime refuses the model's folder already."""
    return is_folder(model) and find_model_problem(Path(model) / "config.json") is not None


def _problem(key: str, value: Any, error: ConfigError) -> Problem:
    return Problem(key, value, str(error).removeprefix(f"{key}={value!r}: "))

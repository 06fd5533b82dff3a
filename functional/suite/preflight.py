"""A recipe for a run: its keys, the runtime's rules, and what the suite wants of the data, all judged together."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from functional.runtime.architectures import find_model_problem, longest_context
from functional.runtime.config import GenerationConfig, Recipe, load_recipe
from functional.runtime.errors import ConfigError
from functional.runtime.options import VLLM_CFG
from functional.runtime.paths import find_file_problem, is_folder
from functional.runtime.rules import BUILTIN_DATA, RULES, Problem, UnreadKeyError
from functional.suite.data import check_count, measure, read_data
from functional.suite.models import ARITHMETIC, ARITHMETIC_DIR, find_tokenizer


def load_for_run(path: Path, overrides: list[str]) -> Recipe:
    """As `load_recipe`; the error names what is wrong with the model's tokenizer and with the data too."""
    return load_recipe(path, overrides, rules=(*RULES, _context, _prompts))


def _context(recipe: Recipe) -> Iterator[Problem]:
    """vLLM refuses a longer context than the model's, but only once a worker starts."""
    name, generation = recipe.policy.model_name, recipe.policy.generation
    folder = ARITHMETIC_DIR if name == ARITHMETIC else Path(name)
    wanted = generation.vllm_cfg.max_model_len
    if not is_folder(str(folder)) or _is_refused(str(folder)):
        return
    longest = longest_context(folder / "config.json")
    if longest is not None and wanted > longest and not _is_stretched(generation):
        message = f"the model takes {longest} positions (max_position_embeddings): set no more"
        yield Problem(f"{VLLM_CFG}.max_model_len", wanted, message)


def _is_stretched(generation: GenerationConfig) -> bool:
    """Whether the recipe has the engine take more positions, or alters the model's configuration."""
    if "hf_overrides" in generation.vllm_kwargs.options():
        return True
    return generation.vllm_cfg.env_vars.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip() == "1"


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

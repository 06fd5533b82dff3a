"""From a file to a recipe: YAML with the guide's keys, `defaults:` parents and `key=value` overrides, then the rules.

NeMo RL's recipes are read as they are: their keys, their resolvers (`${mul:2,3}`), `_override_`, and Hydra's `+` and
`++` before an override. Everything that is wrong with the keys is said at once, each with its key path and value.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.foreign_keys import Recast, known_below
from functional.runtime.recipe.model import Recipe, Section
from functional.runtime.recipe.options import nearest_key
from functional.runtime.recipe.rules import RULES, Problem, Rule, find_problems

GENERATION_HINTS = {
    "backend": "the managed runtime is dynamo",
    "dynamo_cfg.engine": "the managed engine is vllm",
    "vllm_cfg.precision": "generation runs in bfloat16 only",
    "vllm_cfg.kv_cache_dtype": "the cache has the model's precision, set auto",
    "temperature": "must be from 0.01 to 2: Dynamo's API takes none above, and vLLM raises lower ones to 0.01 unseen",
    "top_p": "must be above 0 and at most 1, which cuts nothing",
    "top_k": "must be a whole number from 1, or null, which cuts nothing",
}
HINTS = {f"policy.generation.{key}": hint for key, hint in GENERATION_HINTS.items()}
"""Said instead of pydantic's words, by key path."""


RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
"""NeMo RL's, beside OmegaConf's own."""
WHOLE = "_override_"
"""A section that has it true takes the place of its parents' whole, and is not merged with it."""

MISSING = "???"
"""OmegaConf's mark for a value that must still be given."""


class RecipeError(ConfigError):
    """A recipe breaks rules; `problems` has them all."""

    def __init__(self, source: Path, problems: list[Problem]) -> None:
        super().__init__(f"{source}: " + "; ".join(map(str, problems)))
        self.problems = problems


def load_recipe(path: Path, overrides: list[str] | None = None, rules: Sequence[Rule] = RULES) -> Recipe:
    """Read `path`, its parents (`defaults:`, relative to it) and dot-list `overrides`.

    Raises ConfigError, one line, naming file, key path and value; RecipeError, with every problem of keys and rules,
    when keys are the cause.
    """
    _register_resolvers()
    merged = _read_with_parents(path, ())
    for override in overrides or ():
        merged = _merge(merged, _read_override(override))
    try:
        plain, unresolved = _resolve(OmegaConf.create(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    recast = Recast(plain)
    recipe, problems = _read(recast.rest, [problem for problem in unresolved if not recast.is_aside(problem.key)])
    named = {problem.key for problem in problems}
    problems += [problem for problem in recast.problems if problem.key not in named]
    problems += find_problems(recipe, rules)
    if problems:
        raise RecipeError(path, problems)
    return recipe.with_keys(recast.keys)


def _register_resolvers() -> None:
    for name, resolve in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_resolver(name, resolve)


def _read_override(override: str) -> Any:
    override = override.lstrip("+")
    key, equals, _ = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r}: expected key=value, for example grpo.max_num_steps=3")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([override]), resolve=False)
    except Exception as error:  # the value stays out of the message: it may be a secret
        raise ConfigError(f"override {key}=…: its value is no YAML: {_one_line(error)}") from error


def _resolve(merged: Any) -> tuple[dict[str, Any], list[Problem]]:
    """The recipe as plain data, and the keys whose `${…}` leads nowhere (null in it) or whose value is still `???`."""
    unresolved: list[Problem] = []
    while True:
        try:
            plain = OmegaConf.to_container(merged, resolve=True)
            return plain, unresolved + list(_missing(plain))
        except InterpolationResolutionError as error:
            key = error.full_key
            if not key or key in [problem.key for problem in unresolved]:
                raise
            unresolved.append(Problem(key, None, _one_line(error).split(" full_key:")[0], has_value=False))
            OmegaConf.update(merged, key, None)


def _missing(section: dict[Any, Any] | list[Any], where: str = "") -> Iterator[Problem]:
    for key, value in section.items() if isinstance(section, dict) else enumerate(section):
        if value == MISSING:
            yield Problem(f"{where}{key}", None, "has no value: ??? stands for one to be given", has_value=False)
        elif isinstance(value, dict | list):
            yield from _missing(value, f"{where}{key}.")


def _read(plain: dict[str, Any], unresolved: list[Problem]) -> tuple[Recipe, list[Problem]]:
    """The recipe as far as it can be read, and what is wrong with its single keys.

    A key at fault is left out of the recipe, not replaced by its default: a rule that asks for it has nothing to judge,
    while all other rules are judged.
    """
    rest = copy.deepcopy(plain)
    problems: dict[tuple[int | str, ...], Problem] = {}
    unread: set[tuple[str, ...]] = set()
    for problem in unresolved:
        where = tuple(re.split(r"[.\[]", problem.key))
        problems[where] = problem
        if key := _leave_out(rest, where):
            unread.add(key)
    while True:
        try:
            recipe = Recipe.model_validate(rest)
        except ValidationError as error:
            for detail in error.errors():
                where = detail["loc"]
                if not any(where[:depth] in problems for depth in range(1, len(where))):  # a stand-in lacks its keys
                    problems.setdefault(where, _problem(detail))
                if key := _leave_out(rest, where):
                    unread.add(key)
        else:
            break
    for key in sorted(unread, key=len):  # a section before what was in it: then nothing of a default is touched
        _forget(recipe, key)
    return recipe, list(problems.values())


def _forget(section: Section, key: Sequence[str]) -> None:
    """Take the value of a key out of a recipe that was just read."""
    name, *within = key
    if not within:
        section.__dict__.pop(name, None)
    elif name in section.__dict__:
        _forget(section.__dict__[name], within)


def _leave_out(rest: Any, where: Sequence[Any]) -> tuple[str, ...] | None:
    """Take what pydantic has found fault with out of `rest`; a required key gets a stand-in.

    Returns the path of the key that has no value now; None for an unknown key, and for one entry of a mapping.
    """
    model: Any = Recipe
    section, depth = rest, 0
    while depth < len(where) - 1:
        inner = _section_of(model.model_fields.get(where[depth]))
        if inner is None or not isinstance(section.get(where[depth]), dict):
            break
        model, section, depth = inner, section[where[depth]], depth + 1
    name, within = where[depth], where[depth + 1 :]
    if within and isinstance(section.get(name), dict):
        section[name].pop(within[0], None)
        return None
    field = model.model_fields.get(name)
    if field is not None and field.is_required():
        section[name] = {} if _section_of(field) else _STAND_INS[field.annotation]
    else:
        section.pop(name, None)
    return None if field is None else tuple(where[: depth + 1])


_STAND_INS: dict[Any, Any] = {str: "", float: 1.0}
"""Values for required keys, by type: only a reading that fails uses them, and no rule sees them."""


def _problem(detail: Any) -> Problem:
    """One of pydantic's errors as ours: with the value at fault, and the nearest key where one is not known."""
    where = [str(part) for part in detail["loc"] if not _is_tag(part)]
    key = ".".join(where) or "recipe"
    if detail["type"] == "missing":
        return Problem(key, None, detail["msg"], has_value=False)
    message = HINTS.get(key, detail["msg"])
    if detail["type"] == "extra_forbidden":
        message = "unknown key" + nearest_key(where[-1], _known_keys(where[:-1]))
    return Problem(key, detail["input"], message, has_value=bool(detail["loc"]))


def _is_tag(part: Any) -> bool:
    """Pydantic names the branch of a union (`list[str]`, `function-…`) among the keys."""
    return isinstance(part, str) and ("[" in part or "(" in part)


def _known_keys(where: list[str]) -> Iterator[str]:
    model: Any = Recipe
    for name in where:
        model = _section_of(model.model_fields.get(name))
        if model is None:
            return
    yield from model.model_fields
    yield from known_below(".".join(where))


def _section_of(field: FieldInfo | None) -> Any:
    """The model that a field holds, None for a field of another kind or an unknown one."""
    if field is None:
        return None
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _read_with_parents(path: Path, seen: tuple[Path, ...]) -> Any:
    resolved = path.resolve()
    if resolved in seen:
        raise ConfigError(f"{path}: `defaults` leads back to itself")
    try:
        loaded = OmegaConf.load(path)
        own = OmegaConf.to_container(loaded, resolve=False)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe (the image's are in /opt/functional/recipes)") from error
    except Exception as error:
        raise ConfigError(f"{path}: not a YAML recipe: {_one_line(error)}") from error
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, found {type(own).__name__}")
    merged: dict[Any, Any] = {}
    for name in _parents(path, loaded):
        merged = _merge(merged, _read_with_parents(path.parent / name, (*seen, resolved)))
    own.pop("defaults", None)
    return _merge(merged, own)


def _parents(path: Path, loaded: Any) -> list[str]:
    try:
        given = loaded.get("defaults")
        given = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: defaults: {_one_line(error)}") from error
    names = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{path}: defaults={given!r}: expected the name of a parent recipe, or a list of names")
    return names


def _merge(earlier: Any, later: Any) -> Any:
    """Sections key by key; anything else `later` replaces, whatever it was, and what it may be is judged afterwards."""
    if not (isinstance(earlier, dict) and isinstance(later, dict)):
        return later
    if later.get(WHOLE):
        return {key: value for key, value in later.items() if key != WHOLE}
    return earlier | {key: _merge(earlier[key], value) if key in earlier else value for key, value in later.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

"""`functional config`: a recipe's verdict, what becomes of each engine option, and what the recipe resolves to."""

import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from functional.runtime.errors import ConfigError
from functional.runtime.fleet.programs import find_programs
from functional.runtime.recipe.argv import WorkerPlace, frontend_arguments, worker_arguments
from functional.runtime.recipe.load import RecipeError
from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.options import GENERATION, VLLM_CFG, VLLM_KWARGS, OptionClass, shown_options
from functional.runtime.recipe.parser_check import EngineCheck
from functional.runtime.recipe.placement import plan_nodes, possible_layouts
from functional.runtime.recipe.redact import redacted
from functional.runtime.recipe.rules import TOOL_DATA, find_warnings, outcome_of_extra
from functional.runtime.recipe.seeds import engine_seed
from functional.suite.models import known_config
from functional.suite.preflight import Prepared, prepare

PARSER_TIMEOUT_S = 120.0


def show_config(path: Path, overrides: list[str], as_json: bool, ask_engine: bool) -> int:
    """Print the verdict. Returns 0; 1 for a recipe that is refused, with all its problems; 2 where there is none,
    which raises ConfigError without `as_json`."""
    try:
        shown = describe(prepare(path, overrides), ask_engine)
    except ConfigError as error:
        is_refused = isinstance(error, RecipeError)
        if as_json:
            print(json.dumps({"valid": False, "error": str(error), "problems": _problems(error)}, indent=2))
        elif is_refused:
            print(f"error: {error}", file=sys.stderr)
        else:
            raise
        return 1 if is_refused else 2
    print(json.dumps(shown, indent=2) if as_json else _as_text(shown), end="\n" if as_json else "")
    return 0


def describe(prepared: Prepared, ask_engine: bool) -> dict[str, Any]:
    """Everything `functional config` tells, as plain data without secrets.

    Raises ConfigError when the engine's own parser is asked, and refuses the command line.
    """
    recipe = prepared.recipe
    # Capitals stand for what only a run knows.
    place = WorkerPlace(Path("/MODEL"), "NAMESPACE", Path("/RUN/kv0"), engine_seed(recipe.grpo.seed, 0, 0))
    worker = worker_arguments(recipe, place)
    frontend_args = recipe.policy.generation.dynamo_cfg.frontend_args
    frontend = frontend_arguments(frontend_args, "HOST", 1, place.namespace)
    if ask_engine:
        with EngineCheck.of(recipe, find_programs().dynamo_python, Path("/")) as check:
            check.result(PARSER_TIMEOUT_S, recipe.scrub)
    return {
        "valid": True,
        "warnings": find_warnings(recipe),
        "options": shown_options(recipe.options),
        "keys": shown_keys(recipe),
        "worker_argv": redacted(worker),
        "frontend_argv": redacted(frontend),
        "engine_parser": "accepted" if ask_engine else "not asked",
        "placement": [str(node) for node in plan_nodes(recipe)],
        "layout": str(recipe.layout),
        "layouts": {
            str(layout): engines for layout, engines in possible_layouts(recipe, known_config(recipe.policy.model_name))
        },
        "data": asdict(prepared.data),
        "recipe": recipe.shown(),
    }


def shown_keys(recipe: Recipe) -> list[dict[str, Any]]:
    """Every key beside the engine's options and what became of it, as plain data without secrets."""
    open_keys = {f"{GENERATION}.{key}" for key in recipe.policy.generation.model_extra or {}}
    open_keys |= {f"loss_fn.{key}" for key in recipe.loss_fn.model_extra or {}}
    used = []
    for path, value in _leaves(recipe.shown(), ""):
        is_open = any(path == key or path.startswith(f"{key}.") for key in open_keys)
        kind, outcome = (OptionClass.INAPPLICABLE, outcome_of_extra(path)) if is_open else (OptionClass.USED, "")
        used.append({"path": path, "value": value, "kind": str(kind), "outcome": outcome})
    named = [asdict(key) | {"value": redacted(key.value, key.path.rpartition(".")[2])} for key in recipe.keys]
    return sorted(used + [key | {"kind": str(key["kind"])} for key in named], key=lambda key: str(key["path"]))


def _leaves(section: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        path = f"{where}{name}"
        if path in (VLLM_CFG, VLLM_KWARGS):  # the engine's options
            continue
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _problems(error: ConfigError) -> list[dict[str, str]]:
    if not isinstance(error, RecipeError):
        return []
    return [{"key": p.key, "value": p.shown_value, "message": p.message} for p in error.problems]


def _as_text(shown: dict[str, Any]) -> str:
    for warning in shown["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    rows = [
        (option["path"].removeprefix(GENERATION + "."), _short(option["value"]), option["kind"], option["outcome"])
        for option in shown["options"]
    ]
    data = shown["data"]
    lines = [
        f"{GENERATION}:",
        _aligned(rows),
        "",
        _aligned((k["path"], _short(k["value"]), k["kind"], k["outcome"]) for k in shown["keys"] if k["outcome"]),
        "",
        f"dynamo.vllm      {shlex.join(shown['worker_argv'])}",
        f"dynamo.frontend  {shlex.join(shown['frontend_argv'])}",
        f"engine's parser  {shown['engine_parser']}",
        *(f"{f'node {number}':<16} {what}" for number, what in enumerate(shown["placement"])),
        f"engine           {shown['layout']}; a node may have "
        + ", ".join(f"{engines} of {layout}" for layout, engines in shown["layouts"].items()),
        f"data             {data['dataset_name']} ({data['source']}), sha256 {data['sha256']}",
        f"longest prompt   {_tokens(data)}",
        "",
        OmegaConf.to_yaml(OmegaConf.create(shown["recipe"])),
    ]
    return "\n".join(lines)


def _aligned(rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of four words as lines, in columns."""
    rows = list(rows)
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join("  ".join([*(row[c].ljust(widths[c]) for c in range(3)), row[3]]) for row in rows)


def _tokens(data: dict[str, Any]) -> str:
    if data["longest_prompt"] is not None:
        return f"{data['longest_prompt']} tokens"
    if data["dataset_name"] == TOOL_DATA:
        return "not measured: it depends on what is answered"
    return "not measured: the model is not on this machine"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"

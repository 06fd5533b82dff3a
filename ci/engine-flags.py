"""Print functional/runtime/recipe/engine_flags.py anew, from the parsers of the Dynamo and vLLM installed in an image.

    ./build.py run --mount "$PWD/ci:/ci:ro" -- python /ci/engine-flags.py >/tmp/engine_flags.py
    mv /tmp/engine_flags.py functional/runtime/recipe/engine_flags.py

A test compares the file with what this prints.
"""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import get_args

from functional.runtime.fleet.programs import find_programs
from functional.runtime.recipe.environment import parser_environment
from functional.runtime.recipe.flags import Kind

READ = """
import argparse, json
from importlib.metadata import version
import vllm
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup
from dynamo.frontend.frontend_args import FrontendArgGroup
from dynamo.vllm.backend_args import DynamoVllmArgGroup
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

def kind(action):
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    return "switch" if action.nargs == 0 else "list" if action.nargs in ("+", "*") else "value"

def flags(parser):
    return {
        flag[2:].replace("-", "_"): kind(action)
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and not flag.startswith("--no-")
    }

engine = FlexibleArgumentParser(add_help=False)
AsyncEngineArgs.add_cli_args(engine, async_args_only=False)
worker, frontend = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
DynamoRuntimeArgGroup().add_arguments(worker)
DynamoVllmArgGroup().add_arguments(worker)
FrontendArgGroup().add_arguments(frontend)
versions = {"ai-dynamo": version("ai-dynamo"), "vllm": vllm.__version__.partition("+")[0]}
print("FLAGS " + json.dumps([versions, flags(engine), flags(worker), flags(frontend)]))
"""
"""Runs in Dynamo's environment."""

TABLES = (
    ("ENGINE_FLAGS", "Flags of vLLM's own parser."),
    ("WORKER_FLAGS", "Flags `dynamo.vllm` adds to the engine's."),
    ("FRONTEND_FLAGS", "Flags of `dynamo.frontend`."),
)
HEAD = '''"""Flags of vLLM and of Dynamo, by kind: made from their own parsers by `ci/engine-flags.py`, not by hand."""

from functional.runtime.recipe.flags import Kind, by_name

VERSIONS = {versions}
"""Versions of the packages whose parsers these are."""
'''
WIDTH = 112


def main() -> None:
    versions, *tables = read_parsers()
    shown = "{" + ", ".join(f'"{name}": "{version}"' for name, version in versions.items()) + "}"
    print(HEAD.format(versions=shown), end="")
    for (name, meaning), flags in zip(TABLES, tables, strict=True):
        print("\n" + "\n".join(table(name, meaning, flags)))


def read_parsers() -> list[dict[str, str]]:
    """Versions by package; then kinds by flag, of each of the tables."""
    command = [str(find_programs().dynamo_python), "-c", READ]
    done = subprocess.run(command, capture_output=True, text=True, env=parser_environment("cpu", {}), timeout=120)
    answer = next((line for line in done.stdout.splitlines() if line.startswith("FLAGS ")), None)
    if answer is None:
        sys.exit(f"error: the parsers cannot be read: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    tables: list[dict[str, str]] = json.loads(answer.removeprefix("FLAGS "))
    return tables


def table(name: str, meaning: str, flags: dict[str, str]) -> Iterator[str]:
    """The lines of one table, its flags in alphabetical order."""
    yield f"{name}: dict[str, Kind] = by_name("
    for kind in get_args(Kind):
        if names := sorted(flag for flag, its_kind in flags.items() if its_kind == kind):
            indent = " " * 8
            yield f'    {kind}="""'
            yield from textwrap.wrap(" ".join(names), WIDTH, initial_indent=indent, subsequent_indent=indent)
            yield '    """,'
    yield ")"
    yield f'"""{meaning}"""'


if __name__ == "__main__":
    main()

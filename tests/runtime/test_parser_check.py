"""The pinned engine's own parsers: the table of flags is theirs, and they judge what a fleet is given."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.engine_flags import ENGINE_FLAGS, FRONTEND_FLAGS, WORKER_FLAGS
from functional.runtime.recipe.parser_check import EngineCheck, parser_environment

READ_FLAGS = """
import argparse, json
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
print("FLAGS " + json.dumps([flags(engine), flags(worker), flags(frontend)]))
"""


def test_the_table_of_flags_is_the_installed_parsers(dynamo_python):
    done = subprocess.run(
        [dynamo_python, "-c", READ_FLAGS],
        capture_output=True,
        text=True,
        env=parser_environment("cpu", {}),
        timeout=120,
    )
    answer = next((line for line in done.stdout.splitlines() if line.startswith("FLAGS ")), None)
    assert answer is not None, done.stderr[-2000:]
    assert json.loads(answer[6:]) == [ENGINE_FLAGS, WORKER_FLAGS, FRONTEND_FLAGS]


def check(python, recipe):
    with EngineCheck.of(recipe, python, Path("/")) as engine_check:
        engine_check.result(120, recipe.scrub)


def test_the_parsers_take_every_kind_of_flag(dynamo_python, read):
    recipe = read(
        "G.vllm_cfg.tensor_parallel_size=4",
        "G.vllm_cfg.expert_parallel_size=4",
        "G.vllm_kwargs={compilation_config: {mode: 0}, cudagraph_capture_sizes: [1, 2], enable_chunked_prefill: false}",
        "G.vllm_kwargs.limit_mm_per_prompt={image: 0}",
        "G.dynamo_cfg.worker_args.tool_call_parser=hermes",
        "G.dynamo_cfg.worker_args.reasoning_parser=qwen3",
        "G.dynamo_cfg.worker_args.enable_structural_tag=true",
        "G.dynamo_cfg.worker_args.extra_cli_args=[--max-logprobs,7,--engine-request-limit=64]",
        "G.dynamo_cfg.frontend_args.extra_cli_args=[--router-temperature=0.5]",
    )
    check(dynamo_python, recipe)


def test_a_value_the_worker_does_not_take(dynamo_python, load):
    with pytest.raises(ConfigError, match=r"parser of dynamo\.vllm: argument --max-num-batched-tokens: .*'many'") as no:
        check(dynamo_python, load("G.vllm_kwargs.max_num_batched_tokens=many"))
    assert "\n" not in str(no.value)


def test_the_check_of_a_gpus_command_lines_on_a_machine_without_one(dynamo_python, tmp_path):
    """ci/parse-argv.py asks about the runtime's own command lines: what the recipe changes in them comes through."""
    tree = Path(__file__).parents[2]
    recipe = tmp_path / "recipe.yaml"
    changed = "policy: {generation: {vllm_kwargs: {max_num_batched_tokens: many}}}"
    recipe.write_text(f"defaults: {tree}/functional/recipes/grpo_gpu.yaml\n{changed}\n")
    words = [sys.executable, tree / "ci/parse-argv.py", recipe]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: refused by the parser of dynamo.vllm: argument --max-num-batched-tokens"
    )


def test_a_value_the_frontend_does_not_take(dynamo_python, load):
    recipe = load("G.dynamo_cfg.frontend_args.extra_cli_args=[--router-temperature=warm]")
    with pytest.raises(ConfigError, match=r"parser of dynamo\.frontend: argument --router-temperature: .*'warm'"):
        check(dynamo_python, recipe)


def test_a_parser_that_dies_is_an_error_of_one_line(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first >&2; echo no such module >&2; exit 3\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="ended with status 3: no such module"):
        EngineCheck(python, [], [], {}).result(10)


def test_a_parser_that_hangs_meets_its_deadline(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"no answer within 0\.2 s"):
        EngineCheck(python, [], [], {}).result(0.2)

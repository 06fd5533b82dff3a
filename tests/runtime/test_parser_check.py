"""The pinned engine's own parsers: the table of flags is theirs, and they judge what a fleet is given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from functional.runtime.errors import ConfigError, RunError
from functional.runtime.recipe import engine_flags
from functional.runtime.recipe.parser_check import EngineCheck

TREE = Path(__file__).parents[2]


def run_script(name, *words):
    """A script of this tree, on this tree's packages."""
    command, environment = [sys.executable, TREE / name, *words], os.environ | {"PYTHONPATH": str(TREE)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_the_flags_are_the_installed_parsers(dynamo_python):
    """The file is what its command makes of the environment it runs in, versions included."""
    done = run_script("ci/engine-flags.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == Path(engine_flags.__file__).read_text(encoding="utf-8")


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
    recipe = tmp_path / "recipe.yaml"
    changed = "policy: {generation: {vllm_kwargs: {max_num_batched_tokens: many}}}"
    recipe.write_text(f"defaults: {TREE}/functional/recipes/grpo_gpu.yaml\n{changed}\n")
    done = run_script("ci/parse-argv.py", recipe)
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
    with pytest.raises(RunError, match=r"no answer within 0\.2 s"):
        EngineCheck(python, [], [], {}).result(0.2)

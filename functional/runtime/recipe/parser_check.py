"""Ask the engine's own parsers whether they take the command lines of a fleet, before anything of it starts."""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from functional.runtime.errors import ConfigError, RunError
from functional.runtime.recipe.argv import WorkerPlace, frontend_arguments, worker_arguments, write_template
from functional.runtime.recipe.environment import parser_environment
from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.seeds import engine_seed

PARSE = """
import argparse, json, sys

def refuse(parser, message):
    raise ValueError(message)

argparse.ArgumentParser.error = refuse  # its words, without the usage text
worker, frontend = json.loads(sys.argv[1])
try:
    program = "dynamo.frontend"
    from dynamo.frontend.frontend_args import FrontendArgGroup, FrontendConfig
    parser = argparse.ArgumentParser()
    FrontendArgGroup().add_arguments(parser)
    FrontendConfig.from_cli_args(parser.parse_args(frontend)).validate()
    program = "dynamo.vllm"
    from dynamo.vllm.args import configure_rl_logprobs_mode, parse_args
    configure_rl_logprobs_mode(parse_args(worker))
except (Exception, SystemExit) as error:
    answer = f"{program}: {error}"
else:
    answer = ""
print("ANSWER " + json.dumps(answer))
"""
"""Runs in Dynamo's environment: the arguments of both programs through their own parsers and cross-checks."""


class EngineCheck:
    """The parsers at work in a process of their own: 10 s of imports, so that other start-up goes on meanwhile."""

    def __init__(
        self,
        python: Path,
        worker: list[str],
        frontend: list[str],
        environment: Mapping[str, str],
        folder: "tempfile.TemporaryDirectory[str] | None" = None,
    ) -> None:
        """Start. worker, frontend: words behind the module names; environment: of the fleet's programs; folder: of
        files that the words name, removed at the end."""
        self._folder = folder
        words = json.dumps([worker, frontend])
        self._process = subprocess.Popen(
            [str(python), "-c", PARSE, words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            text=True,
        )
        self.began = time.monotonic()
        self.seconds = 0.0

    @classmethod
    def of(cls, recipe: Recipe, python: Path, model_dir: Path) -> Self:
        """Start on the command lines a recipe's fleet will have; what only the fleet knows is stood in for."""
        generation = recipe.policy.generation
        folder = tempfile.TemporaryDirectory(prefix="parse")
        place = WorkerPlace(model_dir, "namespace", Path(folder.name) / "kv", engine_seed(recipe.grpo.seed, 0, 0))
        write_template(generation.dynamo_cfg.worker_args, place)
        worker = worker_arguments(recipe, place)
        frontend = frontend_arguments(generation.dynamo_cfg.frontend_args, "127.0.0.1", 1, "namespace")
        environment = parser_environment(recipe.cluster.device, generation.vllm_cfg.env_vars)
        return cls(python, worker, frontend, environment, folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def result(self, timeout_s: float, scrub: Callable[[str], str] = str) -> None:
        """Wait for the verdict. Raises ConfigError with the parser's words, `scrub`bed, when it refuses; RunError when
        there is no answer within `timeout_s`, which is the machine's fault and not the recipe's."""
        try:
            output, errors = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            why = "the machine is busy, or the time too short"
            raise RunError(f"the engine's parser gave no answer within {timeout_s:g} s: {why}") from None
        finally:
            self.close()
        self.seconds = time.monotonic() - self.began
        answers = [line[len("ANSWER ") :] for line in output.splitlines() if line.startswith("ANSWER ")]
        if not answers:
            last = (errors.strip().splitlines() or ["no output"])[-1]
            status = self._process.returncode
            raise ConfigError(f"the engine's parser ended with status {status}: {scrub(last)[:300]}")
        if refusal := json.loads(answers[-1]):
            raise ConfigError(f"refused by the parser of {' '.join(scrub(str(refusal)).split())[:400]}")

    def close(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()

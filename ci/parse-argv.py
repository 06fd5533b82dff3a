"""Check that the locked Dynamo and vLLM accept the command lines that the runtime makes of a recipe; needs no GPU.

    ./build.py run --name cuda-trixie --mount "$PWD/ci:/ci:ro" -- python /ci/parse-argv.py recipes/grpo_gpu.yaml

vLLM takes defaults from its platform while it builds the parser. Without a driver there is none, and the CPU platform
is used instead.
"""

import sys
from pathlib import Path

from functional.runtime.errors import ConfigError
from functional.runtime.fleet.programs import find_programs
from functional.runtime.recipe import parser_check
from functional.runtime.recipe.load import load_recipe

STAND_IN = """
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()
"""
TIMEOUT_S = 120.0


def main(recipe: str) -> None:
    parser_check.PARSE = STAND_IN + parser_check.PARSE
    try:
        with parser_check.EngineCheck.of(load_recipe(Path(recipe)), find_programs().dynamo_python, Path("/")) as check:
            check.result(TIMEOUT_S)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(f"{recipe}: the parsers of dynamo.vllm and dynamo.frontend accept the runtime's arguments")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: parse-argv.py RECIPE")
    main(sys.argv[1])

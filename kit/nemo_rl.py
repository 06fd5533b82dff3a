"""NeMo RL on the host: the versions that its tree pins, for our lock of what it imports."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import UsageError
from kit.files import write_atomic
from kit.layout import LOCKFILES, REPO
from kit.markers import holds
from kit.nemo_tree import LAYOUT, MADE_FOR, PINS, Tree, TreeError, check_pins_of, is_nemo_rl, read_tree
from kit.steps import say

# What the tree's own Dynamo environment and ours must have in common.
_OF_DYNAMO = ("ai-dynamo", "nvidia-nccl-cu13", "vllm")
# What NeMo RL runs on in an image, whatever the host is: nemo-rl.toml is the same wherever it is written.
_PYTHON, _MACHINE = "3.13", "x86_64"


def write_made_for(folder: Path, locked: dict[str, str]) -> None:
    """Write lockfiles/nemo-rl.toml for this tree; `locked` are the pins of our Dynamo environment."""
    if not is_nemo_rl(folder):
        raise UsageError(f"{folder} is not NeMo RL", LAYOUT)
    tree = _read(folder)
    theirs, open_ones = _resolved(_lock(folder / PINS[1]), _OF_DYNAMO)
    for name, versions in open_ones.items():
        raise UsageError(
            f"{folder / PINS[1]} has {name} in several versions ({', '.join(versions)}), and none of them for sure",
            "its Dynamo environment cannot be compared with ours: give a tree whose lock has one",
        )
    for name, version in theirs.items():
        if locked.get(name) != version:
            raise UsageError(
                f"{folder} wants {name} {version} in its Dynamo environment, and ours has {locked.get(name, 'none')}",
                "change lockfiles/dynamo-*.in first",
            )
    # Those that nemo-rl.in gives no version.
    asked = re.findall(r"^([a-z0-9-]+)(?:\[.*\])?\s*(?:#.*)?$", (LOCKFILES / "nemo-rl.in").read_text(), re.MULTILINE)
    pins, open_ones = _resolved(_lock(folder / PINS[0]), asked)
    for name, versions in open_ones.items():
        say(
            f"note: {folder / PINS[0]} has {name} in several versions ({', '.join(versions)}): it pins none here; give"
            " lockfiles/nemo-rl.in one, if that of the other environments, else the newest, is not meant"
        )
    lines = [
        "# The NeMo RL tree that nemo-rl-*.txt were made for: ./build.py lock nemo-rl --nemo-rl TREE writes this file.",
        f'commit = "{tree.commit}"',
        "",
        "[sha256]",
        *(f'"{name}" = "{digest}"' for name, digest in tree.pins.items()),
        "",
        "# What its uv.lock has of the packages that nemo-rl.in gives no version, for its base environment.",
        "[pins]",
        *(f'{name} = "{version}"' for name, version in sorted(pins.items())),
    ]
    write_atomic(REPO / MADE_FOR, "\n".join(lines) + "\n")


@dataclass(frozen=True)
class Checkout:
    """A clone of NeMo RL that an image can be built with."""

    folder: Path
    commit: str


def tree_to_build(folder: Path | None) -> Checkout | None:
    """The tree that was asked for; nothing, and a line, for a folder that is not NeMo RL. Raises UsageError."""
    if folder is None:
        return None
    folder = folder.absolute()
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}", "give a clone of NeMo RL")
    if not is_nemo_rl(folder):
        say(f"note: {folder} is not NeMo RL ({LAYOUT}), and counts as none")
        return None
    tree = _read(folder)
    try:
        check_pins_of(tree, REPO / MADE_FOR)
    except TreeError as error:
        raise UsageError(str(error)) from None
    return Checkout(folder, tree.commit)


def _read(folder: Path) -> Tree:
    try:
        return read_tree(folder)
    except TreeError as error:
        raise UsageError(str(error)) from None


def pinned_by_tree() -> dict[str, str]:
    """Package → version, of the tree that the lock is made for."""
    made_for: dict[str, Any] = tomllib.loads((REPO / MADE_FOR).read_text())
    return dict(made_for["pins"])


def _lock(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UsageError(f"{path} is missing", "this NeMo RL has no Dynamo backend, or is not whole")
    return list(tomllib.loads(path.read_text())["package"])


def _resolved(
    packages: list[dict[str, Any]], names: Sequence[str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Of these packages the versions that the project itself gets, without any extra; and those that are in the lock in
    several versions, of which it names none: they are for other packages, by markers."""
    versions: dict[str, set[str]] = {}
    for package in packages:
        # A local version ("+cu130") is another build of the same.
        versions.setdefault(package["name"], set()).add(package.get("version", "").partition("+")[0])
    (project,) = (package for package in packages if "." in package["source"].values())
    wanted: dict[str, set[str]] = {}
    for one in project["dependencies"]:
        if "version" in one and holds(one.get("marker"), _PYTHON, _MACHINE):
            wanted.setdefault(one["name"], set()).add(one["version"].partition("+")[0])
    found = {name: sorted(wanted.get(name) or versions.get(name, set())) for name in names}
    pinned = {name: held[0] for name, held in found.items() if len(held) == 1}
    return pinned, {name: tuple(held) for name, held in found.items() if len(held) > 1}

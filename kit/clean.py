"""Remove what the kit made, and print what is removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from kit.errors import KitError
from kit.files import tree_size
from kit.layout import REPO, only_run, state_dir
from kit.services import services_status, stop_services
from kit.steps import say, size_text

_CACHES = ("docker", "registry", "run", "logs", "services", "tmp")


def remove_products() -> None:
    """Stop the services; remove the releases, the engine's data and the registry's. Inputs and tools stay."""
    stop_services()
    with only_run("clean"):
        releases = [path for path in _children(REPO / "dist") if path.name != "inputs"]
        _remove([*releases, *(state_dir() / name for name in _CACHES)])


def remove_everything() -> None:
    """Also remove the inputs, the unpacked tools and the Python environment: the tree as it was cloned."""
    stop_services()
    if any(service["running"] for service in services_status().values()):
        raise KitError("a service does not stop", "see ./build.py services status")
    _remove([REPO / "dist", state_dir(), REPO / ".venv"])


def _children(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _remove(paths: Iterable[Path]) -> None:
    total = 0
    for path in paths:
        if not path.exists():
            continue
        size = tree_size(path) if path.is_dir() else path.stat().st_size
        total += size
        say(f"removing {path} ({size_text(size)})")
        shutil.rmtree(path)
    say(f"removed {size_text(total)}" if total else "nothing to remove")

"""Cleaning says what it removes, and keeps what it should."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kit.layout import REPO
from tests.kit.conftest import Kit

pytestmark = pytest.mark.unit


@pytest.fixture
def used(tmp_path: Path) -> Kit:
    """A copy of the kit with something of everything that it makes."""
    root = tmp_path / "copy"
    shutil.copytree(REPO / "kit", root / "kit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "build.py", root)
    for name in ("dist/cpu/record.json", "dist/inputs/cpu/inputs.json", ".state/docker/blob", ".state/engine/dockerd"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"x" * 100_000)
    return Kit(root)


def files(root: Path) -> set[str]:
    kept = ("dist", ".state")
    return {str(path.relative_to(root)) for top in kept for path in (root / top).rglob("*") if path.is_file()}


def test_clean_removes_releases_and_caches_and_keeps_inputs_and_tools(used: Kit) -> None:
    finished = used("clean")
    assert finished.returncode == 0, finished.stderr
    assert f"removing {used.root / 'dist/cpu'} (" in finished.stderr
    assert f"removing {used.root / '.state/docker'} (" in finished.stderr
    assert files(used.root) - {".state/locks/clean.lock"} == {"dist/inputs/cpu/inputs.json", ".state/engine/dockerd"}


def test_clean_all_leaves_nothing(used: Kit) -> None:
    assert used("clean", "--all").returncode == 0
    assert files(used.root) == set()
    assert (used.root / "kit").is_dir()


def test_a_clean_tree_has_nothing_to_remove(used: Kit) -> None:
    used("clean", "--all")
    assert "nothing to remove" in used("clean", "--all").stderr

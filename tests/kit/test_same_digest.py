"""One commit, one digest: images made in different folders, of wheels fetched at different times, are equal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.build_json import build_json
from kit.diff import Change, LayerDifference, diff_images
from kit.layout import REPO, inputs_dir, nemo_rl_inputs, state_dir
from kit.record import read_record
from kit.sources import LEFT_OUT, SOURCES, tree_sha256
from kit.verify import verify_release
from tests.kit.nemo_trees import write_made_for, write_tree

REAL_STATE = state_dir()
# Builds one stage as by hand, with our engine, into the folder `out`.
BY_HAND = """
import os, subprocess, sys
from kit.services import engine
with engine() as docker:
    words = ["--file=docker/Dockerfile", "--provenance=false", "--output=type=local,dest=out", *sys.argv[1:], "."]
    subprocess.run(docker.argv("buildx", "build", *words), env=os.environ | docker.env, check=True)
"""
NEEDED = ("kit", "sqsh", "ci", "docker", "functional", "lockfiles", "tests/functional")
SMALL = {
    "trainer-cpu": ("iniconfig", "packaging", "setuptools", "uv"),
    "dynamo-cpu": ("iniconfig",),
    "nemo-rl-cpu": ("iniconfig", "antlr4-python3-runtime"),
}
"""Lockfile → the pins that are left in it: what our own package is built with, and something to install."""
# Fetches, gives the wheels another time, and builds. Small locks lack the pins that must agree in all of them.
DRIVER = """
import os, sys, time
from pathlib import Path
import kit.image
from kit.fetch import fetch_inputs
from kit.layout import inputs_dir
kit.image.check_pins = lambda: None
tree = Path(sys.argv[3]) if sys.argv[3:] else None
fetch_inputs("cpu", nemo_rl=tree is not None)
for wheel in inputs_dir("cpu").rglob("wheels/*"):
    os.utime(wheel, (time.time() + int(sys.argv[1]),) * 2)
kit.image.make_image("small", "cpu", with_dynamo=False, nemo_rl=tree, lean=sys.argv[2] == "lean")
"""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder with the tree's own tools and nothing else."""
    state = tmp_path / "state"
    state.mkdir()
    for tools in ("engine", "runtime"):
        (state / tools).symlink_to(REAL_STATE / tools)
    for name in ("engine.kind", "version"):
        shutil.copy(REAL_STATE / name, state / name)
    yield state
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in left


needs_engine = pytest.mark.skipif(
    not (inputs_dir("cpu") / "inputs.json").exists() or not (REAL_STATE / "engine").exists(),
    reason="needs ./build.py fetch and the kit's own engine",
)


def copied(root: Path) -> Path:
    """The repository as far as a build needs it, with small locks and the tree's own base."""
    for name in NEEDED:
        shutil.copytree(REPO / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    shutil.copy(REPO / ".dockerignore", root)
    for name, packages in SMALL.items():
        lockfile = root / f"lockfiles/{name}.txt"
        pins = re.split(r"\n(?=\S)", lockfile.read_text())
        lockfile.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] in packages) + "\n")
    take_base(inputs_dir("cpu"), root / "dist/inputs/cpu")
    return root


def take_base(made: Path, inputs: Path) -> None:
    (inputs / "wheels").mkdir(parents=True)
    os.link(made / "base.tar", inputs / "base.tar")
    there = json.loads((made / "inputs.json").read_text())
    (inputs / "inputs.json").write_text(json.dumps({**there, "locks": {}, "wheels": {}}))


def make_different(root: Path) -> None:
    """Whatever differs between two checkouts of one commit: times, what the umask leaves, leftovers of other runs."""
    for path in [root, *root.rglob("*")]:
        if path.name != "base.tar":
            path.chmod(path.stat().st_mode & ~0o077)
            os.utime(path, (1_000_000_000, 1_000_000_000))
    for leftover in ("__pycache__/x.pyc", "build/lib/x.py", "dynamo_rl.egg-info/PKG-INFO", ".mypy_cache/x"):
        (root / "functional" / leftover).parent.mkdir(parents=True)
        (root / "functional" / leftover).write_text("left")


def build(root: Path, state: Path, offset: int, how: str, *more: str) -> Path:
    """The layout of an image made in `root`, of wheels that lie there for `offset` seconds more than since now."""
    env = {**os.environ, "KIT_STATE": str(state)}
    finished = subprocess.run(
        [sys.executable, "-c", DRIVER, str(offset), how, *more], cwd=root, env=env, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    return root / "dist/small/oci"


def named(first: Path, second: Path) -> dict[str, str]:
    """Path → change, over all layers."""
    layers: list[LayerDifference] = diff_images(str(first), str(second)).layers
    changes: list[Change] = [change for layer in layers for change in layer.changes]
    return {change.path: change.change for change in changes}


@pytest.mark.image
@needs_engine
def test_two_folders_and_two_fetches_make_one_image(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = copied(tmp_path / "one"), copied(tmp_path / "another, elsewhere")
    make_different(other)
    first = build(one, state, 0, "lean")  # nothing of it is left in the engine for the second
    second = build(other, state, -86_400, "")
    difference = diff_images(str(first), str(second))
    assert difference.equal, difference.model_dump_json(indent=1)

    monkeypatch.setattr("kit.layout.REPO", one)
    found = {(finding.section, finding.what): finding for finding in verify_release("small").root}
    assert found["image", "inputs in the image's /opt/release/build.json"].result == "ok"

    with (other / "functional/recipes/grpo_cpu.yaml").open("a") as file:
        file.write("# changed on purpose\n")
    assert named(first, build(other, state, 0, "")) == {
        "/opt/functional/recipes/grpo_cpu.yaml": "changed",
        "/opt/release/build.json": "changed",
    }


def by_hand(root: Path, state: Path, *words: str) -> set[str]:
    """The files of the stage that was built."""
    shutil.rmtree(root / "out", ignore_errors=True)
    env = {**os.environ, "KIT_STATE": str(state)}
    subprocess.run([sys.executable, "-c", BY_HAND, *words], cwd=root, env=env, check=True, capture_output=True)
    return {str(path.relative_to(root / "out")) for path in (root / "out").rglob("*") if path.is_file()}


@pytest.mark.image
@needs_engine
def test_what_a_build_by_hand_takes(tmp_path: Path, state: Path) -> None:
    root, tree = copied(tmp_path / "kit"), tmp_path / "tree"
    shutil.rmtree(root / "dist")
    inputs = {"inputs.json", "archives/a", "wheels/a"}
    more = {"nemo-rl/inputs.json", "nemo-rl/wheels/a"}
    for name in inputs:
        (root / "dist/inputs/cpu" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dist/inputs/cpu" / name).write_text("a")
    assert by_hand(root, state, "--target=inputs") == inputs
    for name in {*more, "nemo-rl/base.tar"}:
        (root / "dist/inputs/cpu" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dist/inputs/cpu" / name).write_text("a")
    assert by_hand(root, state, "--target=inputs") == inputs | more

    # Of a context that nobody asked for, what it takes to name it; the kit's own tree is none.
    write_tree(tree)
    given, asked = ("--target=given-tree", f"--build-context=nemo-rl={tree}"), "--build-arg=NEMO_RL=1"
    assert by_hand(root, state, "--target=given-tree", "--build-context=nemo-rl=.") == set()
    assert by_hand(root, state, *given) == {"nemo_rl/__init__.py", "pyproject.toml", "uv.lock"}
    whole = by_hand(root, state, *given, asked)
    assert {"docker/dynamo/uv.lock", ".git/HEAD"} <= whole
    assert "kept.log" not in whole  # its .dockerignore says so


@pytest.mark.image
@pytest.mark.full
@needs_engine
def test_a_small_tree_of_nemo_rl_goes_in(tmp_path: Path, state: Path) -> None:
    commit = write_tree(tmp_path / "tree")
    made: list[Path] = []
    for name in ("one", "another, elsewhere"):
        root = copied(tmp_path / name)
        write_made_for(root / "lockfiles/nemo-rl.toml", commit)
        if (nemo_rl_inputs("cpu") / "inputs.json").exists():
            take_base(nemo_rl_inputs("cpu"), root / "dist/inputs/cpu/nemo-rl")
        elif made:
            take_base(made[0].parents[1] / "inputs/cpu/nemo-rl", root / "dist/inputs/cpu/nemo-rl")
        made.append(build(root, state, -86_400 * len(made), "", str(tmp_path / "tree")))
    difference = diff_images(str(made[0]), str(made[1]))
    assert difference.equal, difference.model_dump_json(indent=1)

    recorded = read_record(made[0].parent / "record.json").image
    assert recorded.nemo_rl is not None
    assert recorded.nemo_rl.commit == recorded.inputs["nemo-rl"] == commit
    assert recorded.nemo_rl.size > 0
    assert build_json(made[0])["environments"]["nemo-rl"]["packages"].keys() == {
        "iniconfig",
        "antlr4-python3-runtime",
    }


@pytest.mark.image
@pytest.mark.full
@needs_engine
def test_two_clones_of_this_commit_make_one_image(tmp_path: Path, state: Path) -> None:
    """The whole image twice, each time of wheels and a base fetched anew and by an engine that has seen nothing."""
    made: list[Path] = []
    for number in (1, 2):
        clone = tmp_path / f"clone{number}"
        subprocess.run(["git", "clone", "--quiet", str(REPO), str(clone)], check=True)
        env = {**os.environ, "KIT_STATE": str(state)}
        subprocess.run(
            [sys.executable, "build.py", "image", "--name", "whole", "--lean"], cwd=clone, env=env, check=True
        )
        shutil.rmtree(clone / "dist/inputs")
        made.append(clone / "dist/whole/oci")
    difference = diff_images(str(made[0]), str(made[1]))
    assert difference.equal, difference.model_dump_json(indent=1)
    assert (
        read_record(made[0].parent / "record.json").image.key == read_record(made[1].parent / "record.json").image.key
    )


@pytest.mark.unit
class TestHash:
    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        (tmp_path / "a/b").mkdir(parents=True)
        (tmp_path / "a/b/file").write_text("1")
        (tmp_path / "a/program").write_text("2")
        (tmp_path / "a/program").chmod(0o755)
        return tmp_path / "a"

    def test_it_depends_on_neither_place_time_nor_umask(self, tree: Path) -> None:
        before = tree_sha256(tree)
        moved = tree.rename(tree.with_name("elsewhere"))
        (moved / "b/file").chmod(0o600)
        (moved / "program").chmod(0o700)
        os.utime(moved / "b/file", (0, 0))
        for leftover in ("__pycache__/x.pyc", "b/build/x", "b/x.egg-info/y", ".ruff_cache/x"):
            (moved / leftover).parent.mkdir(parents=True)
            (moved / leftover).write_text("left")
        assert tree_sha256(moved) == before

    @pytest.mark.parametrize("change", ["content", "name", "program", "more", "link"])
    def test_every_change_is_another_hash(self, tree: Path, change: str) -> None:
        before = tree_sha256(tree)
        if change == "content":
            (tree / "b/file").write_text("2")
        elif change == "name":
            (tree / "b/file").rename(tree / "b/File")
        elif change == "program":
            (tree / "b/file").chmod(0o755)
        elif change == "more":
            (tree / "b/empty").touch()
        else:
            (tree / "b/file").unlink()
            (tree / "b/file").symlink_to("../program")
        assert tree_sha256(tree) != before

    def test_the_build_and_the_hash_leave_out_the_same(self) -> None:
        lines = (REPO / ".dockerignore").read_text().splitlines()
        assert {line.removeprefix("**/") for line in lines if line.startswith("**/")} == set(LEFT_OUT)

    def test_all_that_the_dockerfile_takes_is_hashed(self) -> None:
        taken = re.findall(r"type=bind,source=([^,]+),", (REPO / "docker/Dockerfile").read_text())
        assert taken
        assert [
            path for path in taken if path.split("/")[0] not in {*SOURCES, "lockfiles"} and path not in SOURCES
        ] == []

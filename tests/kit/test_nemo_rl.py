"""NeMo RL's tree as part of an image: what is refused before a build, and what the build's own step makes of it."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging import markers

from docker import install_nemo_rl
from docker.compile_bytecode import compile_share
from kit import nemo_rl
from kit.errors import UsageError
from kit.layout import LOCKFILES, REPO
from kit.lock import SETS, pins
from kit.nemo_rl import tree_to_build
from kit.nemo_tree import TreeError, check_pins_of, is_nemo_rl, read_tree
from tests.kit.conftest import Kit, refused
from tests.kit.nemo_trees import FILES, INSTALL, UV_LOCK, commit, git, write_made_for, write_tree

pytestmark = pytest.mark.unit
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_tree(tmp_path / "tree")
    return tmp_path / "tree"


@pytest.fixture
def made_for(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock's note of this tree, where the kit and the build look for it."""
    path = tmp_path / "nemo-rl.toml"
    write_made_for(path, read_tree(tree).commit)
    monkeypatch.setattr(nemo_rl, "MADE_FOR", path)
    monkeypatch.setattr(install_nemo_rl, "MADE_FOR", path)
    return path


def test_the_suite_links_the_environments_of_the_actors_that_the_image_has() -> None:
    """Neither side may import the other."""
    source = ast.parse((REPO / "functional/suite/nemo_rl/launch.py").read_text())
    (named,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ACTORS"
    )
    assert named == install_nemo_rl.ACTORS


class TestChecked:
    def test_commit_and_pins_are_read(self, tree: Path, made_for: Path) -> None:
        (tree / "ignored").mkdir()
        (tree / "ignored/results").write_text("of a run")
        found = read_tree(tree)
        assert found.commit == git(tree, "rev-parse", "HEAD").strip()
        assert set(found.pins) == {"uv.lock", "docker/dynamo/uv.lock"}
        check_pins_of(found, made_for)
        assert tree_to_build(tree) == nemo_rl.Checkout(tree, found.commit)

    @pytest.mark.parametrize("change", ["changed", "staged", "more", "gone"])
    def test_a_dirty_tree_is_refused(self, tree: Path, made_for: Path, change: str) -> None:
        if change == "more":
            (tree / "nemo_rl/more.py").touch()
        elif change == "gone":
            (tree / "kept.log").unlink()
        else:
            (tree / "nemo_rl/__init__.py").write_text("")
        if change == "staged":
            git(tree, "add", "--all")
        with pytest.raises(UsageError, match=r"is not as its commit [0-9a-f]{12} is \(.*\): commit these changes"):
            tree_to_build(tree)

    def test_a_build_misses_what_dockerignore_names_and_nothing_else(self, tree: Path) -> None:
        (tree / "kept.log").unlink()
        read_tree(tree, may_lack_files=True)
        (tree / "nemo_rl/__init__.py").write_text("")
        with pytest.raises(TreeError, match="nemo_rl/__init__"):
            read_tree(tree, may_lack_files=True)

    def test_other_pins_are_refused_and_another_commit_is_not(self, tree: Path, made_for: Path) -> None:
        (tree / "nemo_rl/more.py").touch()
        commit(tree)
        assert tree_to_build(tree) is not None
        (tree / "uv.lock").write_text(UV_LOCK.replace("5.5.4", "5.5.5"))
        changed = commit(tree)
        with pytest.raises(UsageError, match=rf"{changed[:12]} of NeMo RL has another uv.lock than .*lock nemo-rl"):
            tree_to_build(tree)

    def test_what_is_not_nemo_rl_counts_as_none(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert not is_nemo_rl(REPO)
        assert tree_to_build(REPO) is None
        assert "is not NeMo RL" in capsys.readouterr().err
        assert tree_to_build(None) is None
        with pytest.raises(UsageError, match=r"no folder .*: give a clone"):
            tree_to_build(REPO / "none")

    def test_no_clone_of_its_own(self, tree: Path) -> None:
        git(tree, "worktree", "add", "--quiet", str(tree.with_name("other")))
        shutil.rmtree(tree / ".git")
        for folder in (tree, tree.with_name("other")):
            with pytest.raises(UsageError, match="is no clone of its own"):
                tree_to_build(folder)

    def test_on_the_command_line(self, tree: Path, tmp_path: Path) -> None:
        kit = Kit(tmp_path / "kit")
        shutil.copytree(REPO / "kit", kit.root / "kit", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(LOCKFILES, kit.root / "lockfiles")
        shutil.copy(REPO / "build.py", kit.root)
        refused(kit("image", "--nemo-rl", tree), 2, "of NeMo RL has another docker/dynamo/uv.lock and uv.lock than")
        (tree / "more").touch()
        refused(kit("image", "--nemo-rl", tree), 2, "is not as its commit", "(more)")
        assert not (kit.root / "dist").exists()


def patched_module(opt: Path) -> Path:
    return opt / f"dynamo_venv/lib/python{HERE}/site-packages/iniconfig/exceptions.py"


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    opt = tmp_path_factory.mktemp("opt")
    for name in ("nemo_rl_venv", "dynamo_venv"):
        venv.create(opt / name, symlinks=True)
    module = patched_module(opt)
    module.parent.mkdir()
    module.write_text("from __future__ import annotations\n")
    compile_share([str(module)])
    return opt


class TestInstalled:
    @pytest.fixture
    def opt(self, environments: Path, tmp_path: Path) -> Path:
        """Environments as the build has them, with a module to patch."""
        return shutil.copytree(environments, tmp_path / "opt", symlinks=True)

    def install(self, tree: Path, opt: Path, monkeypatch: pytest.MonkeyPatch, asked: str = "1") -> Path:
        monkeypatch.setenv("NEMO_RL", asked)
        install_nemo_rl.main(tree, opt, opt / "known.json")
        return opt / "known.json"

    def where(self, python: Path, folder: Path, **env: str) -> Path:
        command = [str(python), "-c", "import nemo_rl; print(nemo_rl.WHERE)"]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        told = subprocess.run(command, cwd=folder, env=clean | env, check=True, capture_output=True, text=True).stdout
        return Path(told.strip()).parent.parent

    @pytest.mark.usefixtures("made_for")
    def test_a_tree(self, tree: Path, opt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tree / "kept.log").unlink()  # as a build gets it
        known = json.loads(self.install(tree, opt, monkeypatch).read_text())
        assert known["commit"] == git(tree, "rev-parse", "HEAD").strip()
        assert list(known["patches"]) == ["small.patch"]
        assert {
            str(path.relative_to(opt / "nemo-rl")) for path in (opt / "nemo-rl").rglob("*") if path.is_file()
        } == set(FILES)

        # The module is the patched one, compiled anew, and the marker says what the tree's own script would.
        assert patched_module(opt).read_text().endswith("PATCHED = True\n")
        (compiled,) = (patched_module(opt).parent / "__pycache__").iterdir()
        assert b"PATCHED" in compiled.read_bytes()
        assert (opt / "dynamo_venv/VLLM_BACKPORTS").read_text() == "a repair, by this patch\n"

        # The image's tree, unless another is in the working folder or named.
        write_tree(tmp_path / "mounted")
        for actor in install_nemo_rl.ACTORS:
            python = opt / "ray_venvs" / actor / "bin/python"
            assert self.where(python, tmp_path) == opt / "nemo-rl"
        assert self.where(python, tmp_path / "mounted") == tmp_path / "mounted"
        assert self.where(python, tmp_path, PYTHONPATH=str(tmp_path / "mounted")) == tmp_path / "mounted"

    @pytest.mark.usefixtures("made_for")
    def test_a_patch_that_does_not_apply_leaves_no_marker(
        self, tree: Path, opt: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        patched_module(opt).write_text("another\n")
        with pytest.raises(SystemExit, match=r"small.patch of NeMo RL does not apply"):
            self.install(tree, opt, monkeypatch)
        assert not (opt / "dynamo_venv/VLLM_BACKPORTS").exists()
        assert not (opt / "known.json").exists()

    @pytest.mark.parametrize("without", ["patches", "dynamo"])
    def test_no_patch_no_marker(
        self, tree: Path, opt: Path, made_for: Path, monkeypatch: pytest.MonkeyPatch, without: str
    ) -> None:
        if without == "patches":
            shutil.rmtree(tree / "docker/dynamo/patches")
            commit(tree)
        else:
            shutil.rmtree(opt / "dynamo_venv")
        assert json.loads(self.install(tree, opt, monkeypatch).read_text())["patches"] == {}
        assert not list(opt.glob("*/VLLM_BACKPORTS"))

    @pytest.mark.usefixtures("made_for")
    def test_a_marker_that_cannot_be_found(self, tree: Path, opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tree / "docker/dynamo/install.sh").write_text(INSTALL.replace("VLLM_BACKPORTS", "SOMETHING"))
        commit(tree)
        with pytest.raises(SystemExit, match=r"has patches and writes no VLLM_BACKPORTS"):
            self.install(tree, opt, monkeypatch)

    def test_what_was_given_and_what_was_asked_must_fit(
        self, tree: Path, opt: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(SystemExit, match=r"is NeMo RL: run ./build.py fetch --nemo-rl and add --build-arg"):
            self.install(tree, opt, monkeypatch, asked="")
        with pytest.raises(SystemExit, match=r"is not NeMo RL .*: give its clone, or no NEMO_RL"):
            self.install(REPO, opt, monkeypatch)
        assert not self.install(REPO, opt, monkeypatch, asked="").exists()
        with pytest.raises(SystemExit, match=r"has another docker/dynamo/uv.lock and uv.lock than"):
            self.install(tree, opt, monkeypatch)  # of another tree than the committed lock's
        assert not (opt / "nemo-rl").exists()


class TestLock:
    def test_the_tree_decides_what_the_other_environments_do_not(self, tree: Path) -> None:
        packages = nemo_rl._lock(tree / "uv.lock")
        asked = ["transformers", "ray", "absent"]
        assert nemo_rl._resolved(packages, asked) == ({"transformers": "5.5.4", "ray": "2.56.1"}, {})
        locked = pins(LOCKFILES / "nemo-rl-cpu.txt")
        assert locked["transformers"] == nemo_rl.pinned_by_tree()["transformers"]

    @pytest.mark.parametrize("profile", ["cpu", "cuda"])
    def test_versions_are_those_of_the_other_environments(self, profile: str) -> None:
        (one,) = (lock for lock in SETS["nemo-rl"] if lock.name.endswith(profile))
        locked = pins(LOCKFILES / f"{one.name}.txt", one.python)
        for name in one.agrees_with:
            other = pins(LOCKFILES / f"{name}.txt", one.python)
            apart = {package for package in locked if package in other and locked[package] != other[package]}
            assert apart <= set(one.differs)

    @pytest.mark.parametrize(
        "host",
        [
            {},  # this one
            {"python_version": "3.11", "python_full_version": "3.11.2", "implementation_version": "3.11.2"},
            {"platform_machine": "aarch64"},
            {"os_name": "nt", "sys_platform": "win32", "platform_system": "Windows", "platform_machine": "AMD64"},
            {"implementation_name": "pypy", "platform_python_implementation": "PyPy"},
            {"platform_release": "5.15.0-tegra", "platform_version": "#1 SMP tegra"},
        ],
    )
    def test_the_images_machine_and_python_decide_and_not_the_hosts(
        self, monkeypatch: pytest.MonkeyPatch, host: dict[str, str]
    ) -> None:
        here = {**markers.default_environment(), **host}
        monkeypatch.setattr(markers, "default_environment", lambda: dict(here))
        choices = {
            "a": ("python_full_version >= '3.13'", "python_full_version < '3.13'"),
            "b": ("python_version == '3.13'", "python_version != '3.13'"),
            "c": ("platform_machine == 'x86_64'", "platform_machine != 'x86_64'"),
            "d": ("sys_platform == 'linux' and os_name == 'posix'", "sys_platform != 'linux' or os_name != 'posix'"),
            "e": ("platform_system == 'Linux'", "platform_system != 'Linux'"),
            "f": ("implementation_name == 'cpython'", "implementation_name != 'cpython'"),
            "g": ("platform_python_implementation == 'CPython'", "platform_python_implementation != 'CPython'"),
            "h": ("platform_release != '5.15.0-tegra'", "platform_release == '5.15.0-tegra'"),
            "i": ("implementation_version >= '3.13'", "implementation_version < '3.13'"),
        }
        asked = [
            {"name": name, "version": version, "marker": marker}
            for name, of_image_and_not in choices.items()
            for version, marker in zip(("1", "2"), of_image_and_not, strict=True)
        ]
        project = {"name": "p", "source": {"virtual": "."}, "dependencies": asked}
        others = [
            {"name": name, "version": version, "source": {"registry": "elsewhere"}}
            for name in choices
            for version in ("1", "2")
        ]
        assert nemo_rl._resolved([project, *others], list(choices)) == (dict.fromkeys(choices, "1"), {})

    def test_several_versions_of_which_the_project_names_none_are_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        written: list[str] = []
        monkeypatch.setattr(nemo_rl, "write_atomic", lambda _, text: written.append(text))
        more = UV_LOCK + two_of("fastapi") + one_of("httpx", "0.28.1")
        write_tree(tmp_path / "tree", FILES | {"uv.lock": more})
        nemo_rl.write_made_for(tmp_path / "tree", {})
        assert re.findall(r"note: .*/uv\.lock has (.*?):", capsys.readouterr().err) == [
            "fastapi in several versions (1, 2)"
        ]
        assert 'httpx = "0.28.1"' in written[0]
        assert "fastapi" not in written[0]

    def test_an_engine_in_several_versions_cannot_be_compared(self, tmp_path: Path) -> None:
        more = FILES["docker/dynamo/uv.lock"] + two_of("vllm")
        write_tree(tmp_path / "tree", FILES | {"docker/dynamo/uv.lock": more})
        with pytest.raises(UsageError, match=r"docker/dynamo/uv\.lock has vllm in several versions \(1, 2\)"):
            nemo_rl.write_made_for(tmp_path / "tree", pins(LOCKFILES / "dynamo-cuda.txt"))

    def test_a_tree_for_another_dynamo_is_refused(self, tmp_path: Path) -> None:
        theirs = """version = 1
[[package]]
name = "p"
version = "1"
source = { virtual = "." }
dependencies = [{ name = "ai-dynamo" }]
[[package]]
name = "ai-dynamo"
version = "9"
source = { registry = "elsewhere" }
"""
        write_tree(tmp_path / "tree", FILES | {"docker/dynamo/uv.lock": theirs})
        with pytest.raises(UsageError, match=r"wants ai-dynamo 9 .*ours has 1\.3\.0\.post1"):
            nemo_rl.write_made_for(tmp_path / "tree", pins(LOCKFILES / "dynamo-cuda.txt"))


def two_of(name: str) -> str:
    return one_of(name, "1") + one_of(name, "2")


def one_of(name: str, version: str) -> str:
    return f'[[package]]\nname = "{name}"\nversion = "{version}"\nsource = {{ registry = "elsewhere" }}\n'

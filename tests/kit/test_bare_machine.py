"""The README's commands on a machine that lacks something: each says so at once, in one line, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit.layout import REPO

pytestmark = pytest.mark.unit
TOOLS = (
    "awk",
    "bash",
    "cat",
    "df",
    "dirname",
    "env",
    "find",
    "grep",
    "make",
    "mkdir",
    "mv",
    "realpath",
    "rm",
    "sed",
    "sleep",
    "tail",
)


class Machine:
    """A fresh clone's scripts, and a PATH with a few tools of the system and whatever stands in for the rest."""

    def __init__(self, root: Path) -> None:
        self.tree, self.bin = root / "clone", root / "bin"
        self.bin.mkdir()
        for name in ("ci", ".ci", "lockfiles", "tests/functional"):
            shutil.copytree(REPO / name, self.tree / name)
        for name in ("Makefile", "build.py"):
            shutil.copy(REPO / name, self.tree)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        self.program("id", "echo 0")

    def program(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!{shutil.which('sh')}\n{script}\n")
        (self.bin / name).chmod(0o755)

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), **env}
        return subprocess.run(words, cwd=self.tree, env=environment, capture_output=True, text=True, timeout=60)

    def refused(self, *words: str, **env: str) -> str:
        """Its one line of error; make adds another of its own."""
        finished = self(*words, **env)
        assert finished.returncode != 0
        lines = [line for line in finished.stderr.splitlines() if not line.startswith("make")]
        assert len(lines) == 1, finished.stderr
        assert lines[0].startswith("error: ")
        return lines[0]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_mistyped_part(machine: Machine) -> None:
    said = machine.refused("make", "test", "PARTS=static units")
    assert said == "error: there is no part 'units': choose of static unit road stations slurm inside faults full"
    assert not (machine.tree / ".state").exists()


@pytest.mark.parametrize("part", ["road", "stations", "inside", "faults", "full"])
def test_no_root(machine: Machine, part: str) -> None:
    machine.program("id", "echo 1000")
    assert (
        machine.refused("make", "test", f"PARTS=unit {part}") == f"error: the part '{part}' needs root: run it as root"
    )
    assert "the demo needs root" in machine.refused("make", "demo")
    assert not (machine.tree / ".state").exists()


def test_packages_are_installed_by_make_test_and_by_others_only_in_ci(machine: Machine) -> None:
    machine.program("apt-get", 'case "$*" in *install*) echo "$@" >>"$PWD/installed"; exit 3 ;; esac')
    said = machine.refused("ci/bootstrap.sh")
    assert said.startswith("error: missing here: ")
    assert "skopeo" in said
    assert "run 'ci/bootstrap.sh --yes' to install these Debian packages" in said
    for command in ("fetch", "image", "push", "bench"):
        assert machine.refused("make", command) == said
    assert not (machine.tree / "installed").exists()
    for command in ("test", "demo"):
        finished = machine("make", command)
        assert finished.returncode != 0
        assert "Installing Debian packages: " in finished.stdout
        assert " skopeo" in (machine.tree / "installed").read_text()
        (machine.tree / "installed").unlink()
    machine("make", "image", CI="true")
    assert (machine.tree / "installed").exists()


def test_packages_without_root(machine: Machine) -> None:
    machine.program("apt-get", "exit 3")
    machine.program("id", "echo 1000")
    assert "without root: run ci/bootstrap.sh --yes as root once" in machine.refused("ci/bootstrap.sh", "--yes")


def test_no_network(machine: Machine) -> None:
    machine.program("apt-get", 'echo "W: x"; echo "E: Failed to fetch an index"; exit 100')
    said = machine.refused("ci/bootstrap.sh", "--yes")
    assert "failed (Failed to fetch an index): see that this machine reaches its package archive" in said


def test_no_python(machine: Machine) -> None:
    for command in ("sqsh", "functional", "verify", "lock"):
        said = machine.refused("make", command)
        assert said.startswith("error: no Python 3.11 or newer with venv here: install python3 and python3-venv")


def test_no_package_index(machine: Machine) -> None:
    (machine.bin / "python3").symlink_to(sys.executable)
    machine.program("uv", 'case "$1" in venv) exit 0 ;; esac; echo one >&2; echo "no route to host" >&2; exit 2')
    said = machine.refused("make", "lock")
    assert "the kit's Python environment cannot be installed (no route to host): see that this machine reaches" in said
    assert not (machine.tree / ".venv/.installed").exists()


def test_commands_without_an_environment_say_how_to_get_one(machine: Machine) -> None:
    (machine.bin / "python3").write_text(f'#!{machine.bin}/bash\nexec {sys.executable} -S "$@"\n')
    (machine.bin / "python3").chmod(0o755)
    assert machine.refused("./build.py", "image").endswith(f"run `make env` in {machine.tree}")
    said = machine.refused("bash", "tests/functional/grpo_dynamo.sh")
    assert said == "error: there is no release with a squashfs in dist: make one: make image sqsh"


def test_ci_runs_make_test_and_nothing_else(machine: Machine) -> None:
    (machine.bin / "make").unlink()
    machine.program("make", 'echo "make $* CI=$CI"')
    assert machine(".ci/run").stdout == "make test CI=true\n"
    (machine.bin / "make").unlink()
    finished = machine(".ci/run")
    assert (finished.returncode, finished.stderr.count("\n")) == (127, 1)
    assert "make: not found" in finished.stderr


def test_the_fixed_work_is_told(machine: Machine) -> None:
    finished = subprocess.run([sys.executable, REPO / "ci/fixed_work.py"], capture_output=True, text=True, check=True)
    words = finished.stdout.split()
    assert words[:5] == ["this", "machine:", "fixed", "work", "took"]
    assert float(words[5]) > 0
    assert words[6:] == ["s,", str(os.cpu_count()), "processors"]

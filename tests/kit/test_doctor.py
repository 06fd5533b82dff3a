"""The host's doctor: no alarm where all is there, and each thing that is missing is named with its next step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from kit import doctor
from kit.doctor import Finding, examine_host
from kit.errors import UsageError
from kit.layout import LOCKFILES
from tests.kit.conftest import Kit, refused

pytestmark = pytest.mark.unit
Usage = namedtuple("Usage", "total used free")


def found(check: str, profile: str = "cpu") -> Finding:
    return next(one for one in examine_host(profile).root if one.check == check)


def test_this_machine_runs_the_tests_and_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IMAGE", raising=False)
    findings = examine_host("cpu").root
    checks = {one.check for one in findings}
    assert {"tools", "Python environment", "rights", "kernel", "disk", "image builder", "registry", "GPUs"} <= checks
    assert all(one.looked_at and one.found for one in findings)
    assert [
        one for one in findings if one.result == "problem" and one.check not in ("disk", "kernel", "releases")
    ] == []


def test_a_tool_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "skopeo" else real(name))
    one = found("tools")
    assert (one.result, one.found) == ("problem", "missing: skopeo")
    assert "bootstrap" in one.next_step


def test_a_package_is_another_than_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "pins", lambda path, python="3.13": {"httpx": "0.0.1", "no-such-package": "1"})
    one = found("Python environment")
    assert one.result == "problem"
    assert "2 of 2 packages differ" in one.found
    assert "no-such-package missing, locked 1" in one.found


def test_too_little_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 99, 1_000_000))
    assert (found("disk").result, found("disk", "cuda").result) == ("problem", "unknown")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_is_full(kit: Kit) -> None:
    """A real one, of 8 MB: what is left is named, and so is a release that could not be written there."""
    shutil.copytree(LOCKFILES, kit.root / "lockfiles")
    disk = kit.root / "dist"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
    try:
        kit.release("tiny", [[]])
        with pytest.raises(OSError, match="No space left on device"):
            (disk / "filler").write_bytes(bytes(8 << 20))
        done = kit("doctor", "--json")
        assert done.returncode == 1
        (disk_found,) = (one for one in json.loads(done.stdout) if one["check"] == "disk")
        assert disk_found["result"] == "problem"
        assert disk_found["found"].startswith("0 B free; a cold pipeline takes 22 GB")
        assert "clean" in disk_found["next_step"]
        refused(kit("sqsh", "--name", "tiny"), 1, "o space left on device")
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has GPUs")
def test_a_profile_that_needs_a_gpu() -> None:
    assert found("GPUs").result == "ok"
    one = found("GPUs", "cuda")
    assert (one.result, one.found) == ("problem", "no NVIDIA driver is loaded")


def test_a_registry_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGE", "127.0.0.1:9/kit:x")
    assert (found("registry").result, found("registry").found) == ("problem", "no answer")


def test_an_ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert found("rights").result == "unknown"


def test_a_profile_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="unknown profile 'gpu'"):
        examine_host("gpu")


def test_a_release_whose_files_are_gone_and_one_that_is_damaged(kit: Kit) -> None:
    kit.release("tiny", [[]])
    shutil.copytree(LOCKFILES, kit.root / "lockfiles")
    assert releases(kit) == {"tiny: as recorded": "ok"}
    shutil.rmtree(kit.root / "dist/tiny/oci")
    assert releases(kit) == {"tiny: not here: oci/": "unknown"}
    (kit.root / "dist/tiny/record.json").write_text("{")
    assert list(releases(kit).values()) == ["problem"]


def releases(kit: Kit) -> dict[str, Any]:
    done = kit("doctor", "--json")
    assert done.returncode in (0, 1)
    return {one["found"]: one["result"] for one in json.loads(done.stdout) if one["check"] == "releases"}

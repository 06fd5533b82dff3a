"""A copy of the kit in a temporary folder, tiny images in it, and a watch on mounts and loop devices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sqsh.convert import Options, convert
from tests.kit.tiny_image import Entry, busybox, write_layout

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Kit:
    """The kit's command line, run from a copy, so that its dist and state are the test's own."""

    root: Path

    @property
    def env(self) -> dict[str, str]:
        dropped = ("NAME", "PROFILE", "KIT_STATE", "CI")
        return {**{key: value for key, value in os.environ.items() if key not in dropped}, "KIT_NO_VENV": "1"}

    def argv(self, *words: str | Path) -> list[str]:
        return [sys.executable, str(self.root / "build.py"), *map(str, words)]

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[Any]:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        streams["text"] = True
        return subprocess.Popen(self.argv(*words), env=self.env, **{**streams, **options})

    def __call__(self, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, text=False, **options)  # decoded here, as text mode would change line ends
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out.decode(), err.decode())

    def release(
        self,
        name: str,
        layers: Sequence[Sequence[Entry]],
        config: Mapping[str, Any] | None = None,
        inputs: Mapping[str, str] | None = None,
    ) -> str:
        """An image with its record in dist/NAME, as `./build.py image` leaves them."""
        folder = self.root / "dist" / name
        digest = write_layout(folder / "oci", layers, config, docker=True)
        record = f"""
from pathlib import Path
from kit.oci import image_size, layout_image, read_manifest
from kit.record import ImageSection, start_record
layout = Path({str(folder / "oci")!r})
there, manifest = layout_image(layout), read_manifest(layout, {digest!r})
image = ImageSection(name={name!r}, profile="cpu", digest={digest!r}, media_type=there.media_type,
                     size=image_size(there, manifest), layers=[layer.digest for layer in manifest.layers],
                     key="0" * 64, inputs={dict(inputs or {})!r}, source_date_epoch=0)
start_record(Path({str(folder / "record.json")!r}), image)
"""
        subprocess.run([sys.executable, "-c", record], cwd=self.root, check=True)
        return digest


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    root = tmp_path / "kit copy"
    for package in ("kit", "sqsh"):
        shutil.copytree(
            REPO / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        )
    shutil.copy(REPO / "build.py", root)
    return Kit(root)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A squashfs with a shell and nothing to start: what most tests of the runner need."""
    folder = tmp_path_factory.mktemp("tiny")
    write_layout(folder / "oci", [busybox()], {"WorkingDir": "/tmp", "Env": ["FROM_IMAGE=yes"]})
    return convert_layout(folder / "oci", folder / "tiny.sqsh")


def convert_layout(layout: Path, out: Path) -> Path:
    return convert(str(layout), out, Options(name="tiny")).out


@pytest.fixture
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever the test did, a moment later no mount and no loop device of it is there."""
    ours = str(tmp_path_factory.getbasetemp())
    before = left_behind(ours)
    yield
    deadline = time.monotonic() + 5
    while left_behind(ours) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_behind(ours) == before


def left_behind(folder: str) -> list[str]:
    """Our mounts of a container, and whatever loop device or mount lies on a file in `folder`."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    loops = subprocess.run(
        ["losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"], capture_output=True, text=True
    )
    return [line for line in (*mounts, *loops.stdout.splitlines()) if folder in line or "lowerdir=lower," in line]


def refused(finished: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error:")]
    assert finished.returncode == status, finished.stderr
    assert len(errors) == 1
    assert finished.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in finished.stderr
    for part in parts:
        assert part in errors[0]


def running(root: Path) -> list[str]:
    """Command lines of programs that name a path of this test."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(str(root) in word for word in words) and process.parent.name != str(os.getpid()):
            found.append(" ".join(words))
    return found

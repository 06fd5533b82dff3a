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

from tests.sqsh.tiny_image import Entry, busybox, write_layout

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

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(self.argv(*words), env=self.env, text=True, **{**streams, **options})

    def __call__(self, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def release(self, name: str, layers: Sequence[Sequence[Entry]], config: Mapping[str, Any] | None = None) -> str:
        """An image with its record in dist/NAME, as the image station leaves them."""
        folder = self.root / "dist" / name
        digest = write_layout(folder / "oci", layers, config, docker=True)
        record = f"""
from pathlib import Path
from kit.record import ImageSection, start_record
image = ImageSection(name={name!r}, profile="cpu", digest={digest!r}, media_type="m", size=1, layers=[], key="0" * 64,
                     inputs={{}}, source_date_epoch=0)
start_record(Path({str(folder / "record.json")!r}), image)
"""
        subprocess.run([sys.executable, "-c", record], cwd=self.root, check=True)
        return digest


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    root = tmp_path / "kit copy"
    shutil.copytree(REPO / "kit", root / "kit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "build.py", root)
    return Kit(root)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A squashfs with a shell and nothing to start: what most tests of the runner need."""
    folder = tmp_path_factory.mktemp("tiny")
    write_layout(folder / "oci", [busybox()], {"WorkingDir": "/tmp", "Env": ["FROM_IMAGE=yes"]})
    return convert_layout(folder / "oci", folder / "tiny.sqsh")


def convert_layout(layout: Path, out: Path) -> Path:
    from kit.oci import find_image
    from kit.sqsh import convert

    work = out.with_suffix(".work")
    work.mkdir()
    convert(find_image(str(layout)), out, "tiny", work)
    shutil.rmtree(work)
    return out


def mounts_and_loops() -> tuple[list[str], str]:
    mounts = [line.split(" - ")[1] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mine = sorted(line for line in mounts if line.split()[0] in ("squashfs", "overlay"))
    loops = subprocess.run(
        ["losetup", "--list", "--noheadings", "--output", "BACK-FILE"], capture_output=True, text=True
    )
    return mine, "\n".join(line for line in loops.stdout.splitlines() if "pytest" in line)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Whatever the test did, no mount and no loop device of it is there a moment later."""
    before = mounts_and_loops()
    yield
    deadline = time.monotonic() + 5
    while mounts_and_loops() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mounts_and_loops() == before

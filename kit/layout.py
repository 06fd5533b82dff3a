"""Paths: the repository, its state folder, the inputs and the releases."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kit.errors import KitError, UsageError
from kit.files import if_supported
from kit.state import REPO as REPO
from kit.state import state_dir as state_dir

LOCKFILES = REPO / "lockfiles"
PROFILES = ("cpu", "cuda", "cuda-trixie")


def inputs_dir(profile: str) -> Path:
    if profile not in PROFILES:
        raise UsageError(f"unknown profile '{profile}'", f"choose one of {', '.join(PROFILES)}")
    return REPO / "dist" / "inputs" / profile


def nemo_rl_inputs(profile: str) -> Path:
    """What an image with NeMo RL takes besides: its base, and the wheels that no other environment has."""
    return inputs_dir(profile) / "nemo-rl"


@dataclass(frozen=True)
class Release:
    """The folder of one release, `dist/<name>`."""

    name: str

    @property
    def folder(self) -> Path:
        return REPO / "dist" / self.name

    @property
    def oci(self) -> Path:
        return self.folder / "oci"

    @property
    def record(self) -> Path:
        return self.folder / "record.json"

    @property
    def sqsh(self) -> Path:
        return self.folder / f"{self.name}.sqsh"

    @property
    def functional(self) -> Path:
        return self.folder / "functional"


def release(name: str) -> Release:
    if not name or name == "inputs" or name.startswith(".") or "/" in name:
        raise UsageError(f"'{name}' cannot name a release", "use a plain word such as cpu or cuda-1.3.0")
    return Release(name)


@contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """Yield an empty folder for a program's temporary files; removed at the end, even if the program is killed."""
    folder = state_dir() / "tmp" / what
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def only_run(what: str) -> Iterator[None]:
    """Hold the state folder's lock for `what`, so that two runs never write the same artifact."""
    folder = state_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{what}.lock").open("a+") as file:
        try:
            with if_supported(folder, f"lock files: see that no other '{what}' runs here"):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise KitError(f"another '{what}' is running here (process {holder})", "wait for it, or end it") from None
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)

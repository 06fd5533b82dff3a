"""A real Slurm of two nodes, and jobs of an ordinary user on it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
STATE = REPO / ".state/slurm-test"
SHARED = STATE / "slurm/shared"  # the nodes' /srv
NODES = ("node1", "node2")
ORDINARY = ("slurmd -D", "local.sh machine", "sleep 0.1")  # what a node runs without a job
OBJECT_STORE_BYTES = 100_000_000


@dataclass(frozen=True)
class Job:
    """A job as Slurm knows it, and its logs."""

    number: str

    @property
    def logs(self) -> Path:
        return SHARED / "alice/logs" / f"{self.number}-logs"

    @property
    def output(self) -> str:
        return (SHARED / "alice" / f"slurm-{self.number}.out").read_text()

    @property
    def phases(self) -> list[dict[str, Any]]:
        path = self.logs / "phases.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def reason(self) -> str:
        """Why it failed, as it says itself."""
        return next((str(phase["reason"]) for phase in self.phases if phase["phase"] == "failed"), "")

    @property
    def log(self) -> str:
        """What the job and its command said, for a failed assertion."""
        return self.output + "".join(path.read_text() for path in sorted(self.logs.glob("*.log")))

    def state(self) -> tuple[str, str]:
        """State and exit code."""
        text = local("run", "scontrol", "show", "job", self.number, "-o").stdout
        facts = dict(word.split("=", 1) for word in text.split() if "=" in word)
        return facts["JobState"], facts["ExitCode"]

    def wait(self, seconds: float = 150) -> tuple[str, str]:
        """State and exit code at its end, once its nodes are free again."""
        deadline = time.monotonic() + seconds
        while (now := self.state())[0] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, f"job {self.number} is {now} after {seconds} s: {self.phases[-1:]}"
            time.sleep(0.3)
        return now

    def wait_for(self, phase: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while all(line["phase"] != phase for line in self.phases):
            assert time.monotonic() < deadline, f"no phase '{phase}' within {seconds} s: {self.phases[-1:]}"
            assert self.state()[0] in ("PENDING", "RUNNING"), self.log
            time.sleep(0.2)

    def cancel(self) -> None:
        local("run", "-u", "alice", "scancel", self.number)


def local(*words: str, check: bool = True, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(
        [REPO / "ci/slurm/local.sh", *words],
        env={**os.environ, "KIT_STATE": str(STATE), "CI": "true"},
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )
    assert not check or finished.returncode == 0, finished.stderr
    return finished


def submit(
    command: str, *options: str, nodes: int = 2, gpus: int = 2, settings: Mapping[str, str] | None = None
) -> Job:
    """As alice, from a folder of hers on the shared file system; `settings` are variables."""
    environment = {
        "CONTAINER": "/srv/images/cpu.sqsh",
        "MOUNTS": "/srv/alice:/srv/alice",
        "COMMAND": command,
        "GPUS_PER_NODE": str(gpus),
        "BASE_LOG_DIR": "/srv/alice/logs",
        "CONTAINER_BACKEND": "runner",
        "OBJECT_STORE_BYTES": str(OBJECT_STORE_BYTES),
        **(settings or {}),
    }
    exclusive = () if "--oversubscribe" in options else ("--exclusive",)
    finished = local(
        *("run", "-u", "alice", "env", "--chdir=/srv/alice", *(f"{key}={value}" for key, value in environment.items())),
        *("sbatch", "--parsable", f"--nodes={nodes}", f"--gres=gpu:{gpus}", *exclusive, "--partition=local"),
        *(*options, "/srv/kit/ray.sub"),
    )
    return Job(finished.stdout.strip())


def left_on_nodes() -> Mapping[str, list[str]]:
    """What is on the nodes and is not there when no job runs: processes, files of /tmp and /dev/shm, FUSE mounts."""
    found = {}
    for node in NODES:
        script = "ps -eo args --no-headers; ls -A /tmp /dev/shm; grep fuse /proc/*/mounts; echo end"
        lines = local("run", "-n", node, "bash", "-c", script, check=False).stdout.splitlines()
        ignored = ("ps -eo", script[:20], "/tmp:", "/dev/shm:", "end", "")
        found[node] = [line for line in lines if line and not any(line.startswith(i) for i in ignored if i)]
        found[node] = [line for line in found[node] if not any(word in line for word in (*ORDINARY, "bash -c ps"))]
    return found


def assert_nothing_left() -> None:
    deadline = time.monotonic() + 20
    while any(left := left_on_nodes().values()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not any(left), left_on_nodes()


@pytest.fixture(scope="session")
def site() -> Iterator[None]:
    name = os.environ.get("NAME") or "cpu"
    squashfs = REPO / "dist" / name / f"{name}.sqsh"
    if not squashfs.exists():
        pytest.fail(f"no squashfs at {squashfs}: make it first: make image sqsh")
    STATE.parent.mkdir(exist_ok=True)
    with STATE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one run of these tests at a time
        yield from cluster(squashfs)


def cluster(squashfs: Path) -> Iterator[None]:
    local("down")
    try:
        local("up", "2", "2")
        images, home = SHARED / "images", SHARED / "alice"
        images.mkdir()
        try:
            os.link(squashfs.resolve(), images / "cpu.sqsh")
        except OSError:
            shutil.copy(squashfs, images / "cpu.sqsh")
        home.mkdir()
        os.chown(home, 30001, 30001)
        yield
    finally:
        local("down")


@pytest.fixture
def nothing_left(site: None) -> Iterator[None]:
    """Each test begins and ends with nodes on which nothing is left of any job."""
    assert_nothing_left()
    yield
    running = [Job(number) for number in local("run", "squeue", "--noheader", "--format=%i").stdout.split()]
    for job in running:  # a test that failed must not fail those after it
        job.cancel()
    for job in running:
        job.wait(60)
    assert_nothing_left()
    assert not running, "the test has left jobs"

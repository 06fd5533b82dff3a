"""The machine that a run's driver is on, and what the run takes of its processors, memory and GPUs."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, Field

from functional.runtime.fleet.guard import descendants
from functional.runtime.jsonlines import JsonLines

INTERVAL_S = 1.0
SAMPLES = 1000
"""A run of any length is sampled about this often, and no more often than INTERVAL_S."""
GPU_TIMEOUT_S = 10.0


class Hardware(BaseModel):
    """The driver's machine."""

    model_config = ConfigDict(extra="forbid")

    processor: str
    cores: int
    memory_bytes: int
    gpus: list[str] = Field(description="Models, in the order of nvidia-smi.")
    driver: str | None = Field(description="Version of the NVIDIA driver; null without one.")
    kernel: str


def read_hardware() -> Hardware:
    """What /proc, and where there is one the NVIDIA driver, say of this machine."""
    rows = ask_gpus("name", "driver_version")
    return Hardware(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpus=[row[0] for row in rows],
        driver=rows[0][1] if rows else None,
        kernel=os.uname().release,
    )


def ask_gpus(*fields: str) -> list[list[str]]:
    """One row a GPU, of nvidia-smi's fields; none where there is no nvidia-smi, or it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode:
        return []
    rows = [[word.strip() for word in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


class UsageSampler:
    """Appends to a JSON Lines file what each part of the run takes of this machine: `parts` (processors in use, and
    resident bytes, by name) and `gpus` (utilization in percent, and bytes in use).

    A thread of its own; a sample that fails is left out, since no measurement may end a run.
    """

    def __init__(self, path: Path, named: Callable[[], Mapping[str, list[int]]]) -> None:
        """named: process ids by the part's name. What is below this process and has no name counts as «other»."""
        self._lines = JsonLines(path)
        self._named = named
        self._seconds: dict[int, float] = {}
        self._began = self._last = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def __enter__(self) -> "UsageSampler":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(GPU_TIMEOUT_S + 5)
        self._lines.close()

    def sample(self) -> dict[str, Any]:
        """One row. Processors: the mean since the row before."""
        named = dict(self._named())
        owner = {pid: name for name, pids in named.items() for pid in pids}
        now = time.monotonic()
        elapsed = max(now - self._last, 1e-3)
        parts: dict[str, list[float]] = {}
        seconds: dict[int, float] = {}
        for pid in {*owner, os.getpid(), *descendants(os.getpid())}:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                times = process.cpu_times()
                seconds[pid] = times.user + times.system
                taken = max(seconds[pid] - self._seconds.get(pid, seconds[pid]), 0.0)
                part = parts.setdefault(owner.get(pid, "other"), [0.0, 0.0])
                part[0] += taken / elapsed
                part[1] += process.memory_info().rss
        self._seconds, self._last = seconds, now
        gpus = [[float(word) for word in row] for row in ask_gpus("utilization.gpu", "memory.used")]
        return {
            "time": time.time(),
            "parts": {name: [round(used, 3), int(resident)] for name, (used, resident) in sorted(parts.items())},
            "gpus": [[used, int(mebibytes * 2**20)] for used, mebibytes in gpus],
        }

    def _run(self) -> None:
        with suppress(Exception):
            self.sample()  # where processors are counted from
        while not self._stop.wait(max(INTERVAL_S, (time.monotonic() - self._began) / SAMPLES)):
            with suppress(Exception):
                self._lines.append(self.sample())


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine

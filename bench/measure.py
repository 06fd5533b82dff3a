"""Measure shell commands: wall and CPU time, memory, disk."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measurement of one method. Times in seconds, sizes in bytes; `load` is the load average before."""

    way: str
    wall_s: float
    cpu_s: float
    memory: int
    disk: int
    size: int
    load: float


def measure(way: str, steps: list[str], out: Path, keep: bool = False) -> Row:
    """Run shell commands one after the other, then sync `out`, which they make.

    Memory is the peak of the sum over their processes, disk the largest decrease of free space on `out`'s file system;
    both are sampled ten times a second, and writes of other programs count too. Exits with an error if a command fails.
    """
    load = os.getloadavg()[0]
    os.sync()
    before = os.times()
    started = time.monotonic()
    with _Watch(out.parent) as watch:
        for step in steps:
            print(f"  {step}", file=sys.stderr)
            process = subprocess.Popen(["bash", "-o", "pipefail", "-c", step], stderr=subprocess.PIPE, text=True)
            watch.pid = process.pid
            error = process.communicate()[1]
            if process.returncode != 0:
                sys.exit(f"error: {way}: {error.strip()[-500:]}")
        with out.open("rb") as file:
            os.fsync(file.fileno())
        wall = time.monotonic() - started
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    row = Row(way, wall, cpu, watch.memory, watch.disk, out.stat().st_size, load)
    print(f"{way}: {wall:.1f} s, CPU {cpu:.1f} s, load before {load:.1f}", file=sys.stderr)
    if not keep:
        out.unlink()
    return row


def best(rows: list[Row]) -> list[Row]:
    """The fastest row of each method, in the order in which the methods first occur."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.way not in found or row.wall_s < found[row.way].wall_s:
            found[row.way] = row
    return list(found.values())


def words(*parts: str | Path) -> str:
    """A shell command."""
    return shlex.join(map(str, parts))


class _Watch:
    """Peaks of memory and disk while it is open."""

    def __init__(self, folder: Path) -> None:
        self.pid = 0
        self.memory = 0
        self.disk = 0
        self._folder = folder
        self._free = _free(folder)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stopped.wait(0.1):
            self.disk = max(self.disk, self._free - _free(self._folder))
            if self.pid:
                self.memory = max(self.memory, sum(map(_resident, _family(self.pid))))


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize


def _family(pid: int) -> list[int]:
    found = [pid]
    for member in found:
        try:
            for task in Path(f"/proc/{member}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0

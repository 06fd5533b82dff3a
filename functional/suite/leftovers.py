"""What a run left behind on this machine: processes, listening ports, shared memory, folders."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from functional.runtime.fleet.guard import SHARED_MEMORY, descendants, shared_memory
from functional.runtime.fleet.ports import is_listening
from functional.runtime.fleet.sockets import command_line


def find_leftovers(
    run_dir: Path,
    ports: Iterable[int],
    folders: Iterable[Path] = (),
    memory: Iterable[Path] = (),
    wait_s: float = 10.0,
) -> list[str]:
    """Describe everything still there after shutdown; what is on its way out gets `wait_s` seconds.

    folders: of the workers, after which their shared memory is named; memory: other files of it that are the run's.
    """
    deadline = time.monotonic() + wait_s
    while (found := _look(run_dir, ports, folders, memory)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def mapped_memory(pids: Iterable[int]) -> set[Path]:
    """Files of shared memory that these processes have mapped: theirs, whatever their names."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                _, begin, name = line.partition(f" {SHARED_MEMORY}/")
                if begin and not name.endswith(" (deleted)"):
                    found.add(SHARED_MEMORY / name)
    return found


def drop_memory(memory: Iterable[Path]) -> list[Path]:
    """Remove what `mapped_memory` found of the run's processes and killed ones have left; returns what is still there.

    What a process has mapped is not left: the run's own count as processes, and others' is theirs.
    """
    mapped, left = mapped_memory(psutil.pids()), []
    for path in sorted({*memory} - mapped):
        try:
            path.unlink(missing_ok=True)
        except OSError:
            left.append(path)
    return left


def _look(run_dir: Path, ports: Iterable[int], folders: Iterable[Path], memory: Iterable[Path]) -> list[str]:
    found = [f"process {pid}: {command}" for pid in descendants(os.getpid()) if (command := command_line(pid)[:120])]
    found += [f"port {port} still listens" for port in ports if is_listening(port)]
    left = {*memory} | {path for folder in folders for path in shared_memory(folder)}
    found += [f"shared memory {path}" for path in sorted(left)]
    if run_dir.exists():
        found.append(f"folder {run_dir}")
    return found

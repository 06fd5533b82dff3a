"""What a run left behind: processes, listening ports, folders."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from functional.runtime.fleet.guard import descendants
from functional.runtime.fleet.ports import is_listening
from functional.runtime.fleet.sockets import command_line


def find_leftovers(run_dir: Path, ports: Iterable[int], wait_s: float = 10.0) -> list[str]:
    """Describe everything still there after shutdown; what is on its way out gets `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while (found := _look(run_dir, ports)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _look(run_dir: Path, ports: Iterable[int]) -> list[str]:
    found = [f"process {pid}: {command}" for pid in descendants(os.getpid()) if (command := command_line(pid)[:120])]
    found += [f"port {port} still listens" for port in ports if is_listening(port)]
    if run_dir.exists():
        found.append(f"folder {run_dir}")
    return found

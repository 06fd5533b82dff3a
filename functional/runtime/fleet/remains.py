"""What a run left on a node: processes, listening ports, folders."""

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from functional.runtime.fleet.guard import shared_memory
from functional.runtime.fleet.ports import is_listening
from functional.runtime.fleet.sockets import command_line
from functional.runtime.recipe.environment import NAMESPACE_VARIABLE


@dataclass(frozen=True)
class Traces:
    """By what a run's remains on a node are known: its programs' namespace, Ray's processes, ports and folders."""

    namespace: str
    pids: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()
    folders: tuple[Path, ...] = ()


def find_remains(traces: Traces, wait_s: float = 10.0) -> list[str]:
    """Describe everything still there; what is on its way out gets `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while (found := _look(traces)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _look(traces: Traces) -> list[str]:
    found = [f"process {pid}: {command}" for pid in _processes(traces) if (command := command_line(pid)[:120])]
    found += [f"port {port} still listens" for port in traces.ports if is_listening(port)]
    found += [f"shared memory {memory}" for folder in traces.folders for memory in shared_memory(folder)]
    return found + [f"folder {folder}" for folder in traces.folders if folder.exists()]


def _processes(traces: Traces) -> set[int]:
    """Every process that has the run's namespace in its environment, whoever its parent is by now."""
    mark = f"{NAMESPACE_VARIABLE}={traces.namespace}".encode()
    found = set(traces.pids)
    for pid in psutil.pids():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
        except OSError:  # it has ended, or is another user's
            continue
    return found

"""Run one command so that nothing of it survives: not its children, not when whoever started it is killed.

    python guard.py LIFELINE_FD GRACE_SECONDS FOLDER COMMAND...

FOLDER, if not empty, is removed once the command's last process has ended, and so is shared memory that is named after
it: FOLDER's name, a dash, anything.

The guard is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): every orphan below it comes to it. It ends the whole
tree when the command ends, when it gets SIGTERM or SIGINT, or when the pipe LIFELINE_FD reports end of file, which the
kernel causes when the starter dies, however it dies. Standard library only: it starts in about 20 ms.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(lifeline: int, grace_s: float, folder: str, command: list[str]) -> int:
    """Run `command` in its own session and return its exit status (128 + N after signal N)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    stop_requested = False

    def on_stop(_signum: int, _frame: object) -> None:
        nonlocal stop_requested
        stop_requested = True

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, on_stop)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    status: int | None = None
    while status is None and not stop_requested:
        readable, _, _ = select.select([lifeline, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
        if lifeline in readable and not os.read(lifeline, 4096):
            stop_requested = True
        status = _reap(child.pid)
    end_status = _end_tree(child.pid, grace_s, status)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        for memory in shared_memory(Path(folder)):
            memory.unlink(missing_ok=True)
    return end_status


def shared_memory(folder: Path) -> list[Path]:
    """What is named after a folder: an engine's ranks on a CPU leave theirs behind."""
    return sorted(SHARED_MEMORY.glob(f"{folder.name}-*"))


def _reap(main_pid: int) -> int | None:
    """Collect every ended child; return the main one's status when it is among them."""
    found = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == main_pid:
            found = os.waitstatus_to_exitcode(raw)


def _end_tree(main_pid: int, grace_s: float, status: int | None) -> int:
    """SIGTERM, then SIGKILL, every process below this one until none is left."""
    deadline = time.monotonic() + grace_s
    if status is None:
        _signal_all([main_pid], signal.SIGTERM)  # the main process shuts its own children down in order
        while status is None and time.monotonic() < deadline:
            time.sleep(0.02)
            status = _reap(main_pid)
    _signal_all(descendants(os.getpid()), signal.SIGTERM)
    short = min(deadline, time.monotonic() + 1.0) if status is not None else time.monotonic()
    while descendants(os.getpid()):
        if time.monotonic() >= short:
            _signal_all(descendants(os.getpid()), signal.SIGKILL)
        time.sleep(0.02)
        status = _first(status, _reap(main_pid))
    return 128 + signal.SIGKILL if status is None else (status if status >= 0 else 128 - status)


def _first(known: int | None, new: int | None) -> int | None:
    return known if known is not None else new


def _signal_all(pids: list[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def descendants(root: int) -> list[int]:
    """Process ids below `root`, from /proc, zombies left out."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]))

"""The guard: nothing of a command outlives it, whoever dies first."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from functional.runtime.errors import ProcessDiedError
from functional.runtime.fleet import guard
from functional.runtime.fleet.process import ManagedProcess

# Starts a daemon that leaves its session and its parent, as Ray's do, then sleeps.
TREE = "setsid sh -c 'sleep 300 & echo $! > {pids}' ; sleep 300"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come in time"
        time.sleep(0.02)


@pytest.fixture
def process(tmp_path):
    command = ["sh", "-c", TREE.format(pids=tmp_path / "pids")]
    process = ManagedProcess("tree", command, tmp_path / "log", os.environ, grace_s=2)
    wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().strip())
    yield process
    process.stop()


def test_stop_ends_the_orphaned_daemon_too(process, tmp_path):
    daemon = int((tmp_path / "pids").read_text())
    assert daemon in process.pids()
    process.stop()
    assert not alive(daemon)
    process.stop()  # again: harmless


def test_a_killed_main_process_takes_its_daemon_along_and_is_reported(process, tmp_path):
    daemon = int((tmp_path / "pids").read_text())
    main = next(
        pid for pid in process.pids() if Path(f"/proc/{pid}/stat").read_text().split()[3] == str(process.guard_pid)
    )
    os.kill(main, signal.SIGKILL)
    wait_for(lambda: process.exit_status() is not None)
    assert process.exit_status() == 128 + signal.SIGKILL
    assert not alive(daemon)
    with pytest.raises(ProcessDiedError, match="tree was killed by SIGKILL"):
        process.check()


def test_nothing_survives_a_killed_starter(tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path; from functional.runtime.fleet.process import ManagedProcess\n"
        f"p = ManagedProcess('x', ['sleep', '300'], Path({str(tmp_path / 'log')!r}), os.environ, 2)\n"
        "time.sleep(0.5); print(p.guard_pid, *p.pids(), flush=True); time.sleep(300)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pids = [int(word) for word in starter.stdout.readline().split()]
    assert len(pids) == 2
    starter.kill()
    starter.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_exit_status_and_output_are_passed_on(tmp_path):
    process = ManagedProcess("quick", ["sh", "-c", "echo said; exit 7"], tmp_path / "log", os.environ)
    wait_for(lambda: process.exit_status() is not None)
    assert process.exit_status() == 7
    with pytest.raises(ProcessDiedError, match=r"quick exited with status 7(.|\n)*said"):
        process.check()


def test_descendants_of_a_process_without_children_are_none():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert guard.descendants(child.pid) == []
        assert child.pid in guard.descendants(os.getpid())
        child.kill()


def test_the_folder_goes_and_the_shared_memory_that_is_named_after_it(tmp_path):
    folder = tmp_path / f"w{uuid.uuid4().hex}"
    folder.mkdir()
    own, other = (guard.SHARED_MEMORY / name for name in (f"{folder.name}-0-[0-1]", f"{folder.name}0-"))
    own.touch()
    other.touch()
    try:
        ManagedProcess("short", ["true"], tmp_path / "log", os.environ, folder=folder).stop()
        assert not folder.exists()
        assert not own.exists()
        assert other.exists()
    finally:
        other.unlink()

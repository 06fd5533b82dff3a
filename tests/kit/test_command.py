"""Programs we run: their output, their failures in one line, and their end when we end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.command import run
from kit.errors import KitError

pytestmark = pytest.mark.unit
REPO = Path(__file__).resolve().parents[2]


def test_output_and_environment_come_through() -> None:
    finished = run(["sh", "-c", 'echo "$A"; cat; echo bad >&2'], env={"A": "one"}, stdin="two\n")
    assert (finished.stdout, finished.stderr, finished.returncode) == ("one\ntwo\n", "bad\n", 0)


def test_a_failure_is_one_line_with_the_last_words_and_the_hint() -> None:
    with pytest.raises(KitError) as caught:
        run(["sh", "-c", "echo first >&2; echo last >&2; exit 3"], hint="do this")
    assert str(caught.value) == "sh failed (exit status 3): first | last: do this"


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(KitError, match="no-such-program is not installed: run ci/bootstrap"):
        run(["no-such-program"])


def test_a_signal_is_named() -> None:
    with pytest.raises(KitError, match="ended by SIGKILL"):
        run(["sh", "-c", "kill -9 $$"])


def test_a_deadline_ends_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(KitError, match="did not finish within 1 s"):
        run(["sh", "-c", f"sleep 60 & echo $! >{pid_file}; wait"], timeout_s=1)
    assert _gone(int(pid_file.read_text()))


def test_a_log_holds_both_streams(tmp_path: Path) -> None:
    log = tmp_path / "logs/x.log"
    with pytest.raises(KitError, match=r"failed \(exit status 1\): out \| err"):
        run(["sh", "-c", "echo out; echo err >&2; exit 1"], log=log)
    assert log.read_text() == "out\nerr\n"


def test_sigterm_to_us_ends_what_we_run(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
import signal, sys
sys.path.insert(0, {str(REPO)!r})
from kit.command import run
from kit.errors import Interrupted
def end(*_): raise Interrupted
signal.signal(signal.SIGTERM, end)
run(["sh", "-c", "sleep 60 & echo $! >{pid_file}; wait"])
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    while not pid_file.exists() or not pid_file.read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) != 0
    assert _gone(int(pid_file.read_text()))


def _gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False

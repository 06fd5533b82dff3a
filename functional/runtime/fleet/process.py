"""Managed processes: each under a guard, in its own process group, with its own log file."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from functional.runtime.errors import ProcessDiedError
from functional.runtime.fleet import guard

LOG_TAIL_LINES = 12
NOISE = re.compile(r"tower_http::trace|InputProcessor is deprecated|nanobind: ")
"""Lines that say nothing of why a process ended: answers to our own health polls, deprecations, exit-time leaks."""


class ManagedProcess:
    """A command under `fleet.guard`; ends with everything it started, also when this process is killed."""

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        environment: Mapping[str, str],
        grace_s: float = 10.0,
        folder: Path | None = None,
    ) -> None:
        """Start `command` with exactly `environment`; output goes to `log`. `folder`: goes away with the command."""
        self.name = name
        self.log = log
        self.grace_s = grace_s
        read_end, self._lifeline = os.pipe()
        os.set_inheritable(read_end, True)
        try:
            with log.open("ab") as output:
                self._guard = subprocess.Popen(
                    [
                        sys.executable,
                        "-S",
                        "-E",
                        guard.__file__,
                        str(read_end),
                        str(grace_s),
                        str(folder or ""),
                        *command,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(environment),
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
        finally:
            os.close(read_end)

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    def pids(self) -> list[int]:
        """Every process of this command, the guard left out."""
        return guard.descendants(self._guard.pid)

    def exit_status(self) -> int | None:
        """None while running; 128 + N after signal N."""
        return self._guard.poll()

    def check(self) -> None:
        """Raise ProcessDiedError, with the last lines of the log, if the process has ended."""
        status = self.exit_status()
        if status is not None:
            end = describe_status(status)
            raise ProcessDiedError(f"{self.name} {end}; last lines of {self.log}:\n{tail(self.log)}")

    def kill(self) -> None:
        """End the process and everything below it by SIGKILL, which ends a stopped process (SIGSTOP) too."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """End the process and everything below it; returns when nothing is left. May be called again."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            self._guard.wait(self.grace_s + 15)
        except subprocess.TimeoutExpired:
            for pid in [*self.pids(), self._guard.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._guard.wait(5)


def describe_status(status: int) -> str:
    """Exit status in words: «was killed by SIGKILL», «exited with status 3»."""
    if status > 128:
        try:
            return f"was killed by {signal.Signals(status - 128).name}"
        except ValueError:
            pass
    return f"exited with status {status}"


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Last lines of a log, terminal colours removed."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    clean = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if not NOISE.search(line)]
    return "\n".join(f"  | {line[:240]}" for line in clean[-lines:])

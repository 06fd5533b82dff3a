"""Run a program, keep the end of its output, and never leave it running."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kit.errors import KitError

GRACE_S = 10.0


@dataclass(frozen=True)
class Finished:
    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    log: Path | None = None,
    check: bool = True,
    timeout_s: float | None = None,
    hint: str | None = None,
) -> Finished:
    """Run `argv` to its end in a process group of its own and return what it printed.

    `env` is added to our own environment. With `log`, both streams are appended to that file, and `stdout` in the
    result is empty. An exception here, Ctrl-C and SIGTERM included, ends the whole group first. A failure is one line:
    program, exit status, its last lines, and `hint`. Raises KitError.
    """
    words = tuple(str(word) for word in argv)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") if log is not None else nullcontext() as log_file:
            try:
                process = subprocess.Popen(
                    words,
                    cwd=cwd,
                    env={**os.environ, **env} if env else None,
                    stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                    stdout=log_file or out,
                    stderr=log_file or err,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise KitError(f"{words[0]} is not installed", hint or "run ci/bootstrap.sh --yes") from error
            try:
                process.communicate(stdin.encode() if stdin is not None else None, timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                end_group(process)
                raise KitError(f"{_name(words)} did not finish within {timeout_s:.0f} s", hint) from error
            except BaseException:
                end_group(process)
                raise
        finished = Finished(words, process.returncode, _text(out), _text(err) if log is None else _tail_of(log))
    if check and finished.returncode != 0:
        raise KitError(f"{_name(words)} failed ({_status(finished.returncode)}): {last_lines(finished.stderr)}", hint)
    return finished


def end_group(process: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """End the process group: SIGTERM, then SIGKILL after `grace_s` seconds."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(grace_s)
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def last_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:])[-600:] or "it printed nothing"


def _name(words: tuple[str, ...]) -> str:
    """Program and, where the first word is one, its subcommand: enough to recognise, short enough for one line."""
    parts = [Path(words[0]).name]
    if words[1:2] == ("-m",):
        return words[2]
    if len(words) > 1 and words[1].isalpha():
        parts.append(words[1])
    return " ".join(parts)


def _status(returncode: int) -> str:
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _tail_of(log: Path, size: int = 8192) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - size))
        return stream.read().decode(errors="replace")

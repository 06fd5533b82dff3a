"""Run a command inside a squashfs: with enroot where it is installed, else with the kit's own runner, as root or
without (kit/rootless.py).

The kit's: util-linux `unshare` makes the namespaces, `kit/container_init.py` is the first process in them. This side
forwards signals and waits. A pipe connects the two: when this process ends, for whatever reason, the pipe closes, the
first process ends, and the kernel removes all processes and mounts of the container.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from kit.container_init import SETUP_FAILED, VARIABLE, Mount, Spec
from kit.errors import KitError, UsageError
from kit.rootless import check_user_namespaces, prepared_root
from kit.state import REPO, state_dir

# Under -I no folder of ours is searched for modules.
INIT = "import sys; sys.path.append(sys.argv.pop(1)); from kit.container_init import main; main()"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENDING = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
SQUASHFS_MAGIC = b"hsqs"


@dataclass(frozen=True)
class Container:
    """What to run in which squashfs. Its changes to files are kept in memory and gone at its end."""

    squashfs: Path
    command: Sequence[str] = ()
    mounts: Sequence[Mount] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    host_network: bool = True
    terminal: bool = True  # pass our standard input on, and the terminal if it is one
    stop_within_s: float | None = None  # after a signal to end; None waits for as long as it takes


@dataclass(frozen=True)
class Ended:
    status: int  # the command's exit status, 128 + N if signal N ended it
    interrupted: bool  # we got a signal to end and passed it on; the status is the command's all the same


def run_container(container: Container, engine: str = "auto") -> Ended:
    """Run it to its end, on our own standard streams and terminal."""
    if engine not in ("auto", "enroot", "own"):
        raise UsageError(f"unknown engine '{engine}'", "choose auto, enroot or own")
    check_squashfs(container.squashfs)
    if engine == "enroot" or (engine == "auto" and shutil.which("enroot")):
        return _run_in_enroot(container)
    return _run_in_namespaces(container)


def make_container(
    squashfs: Path, command: Sequence[str], mounts: Sequence[str], env: Sequence[str], network: str
) -> Container:
    """The container that a command line asks for."""
    if network not in ("host", "none"):
        raise UsageError(f"unknown network '{network}'", "choose host or none")
    parsed = [parse_mount(text) for text in mounts]
    return Container(squashfs, command, parsed, parse_env(env), host_network=network == "host")


def parse_mount(text: str) -> Mount:
    """`SRC:DST[:ro|rw]`, where SRC exists here and DST is absolute there."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target.startswith("/") or mode not in ("", "ro", "rw"):
        raise UsageError(f"cannot mount '{text}'", "write SRC:/DST or SRC:/DST:ro")
    if not Path(source).exists():
        raise UsageError(f"cannot mount '{text}'", f"there is no {source} here")
    return Mount(source=str(Path(source).absolute()), target=target, read_only=mode == "ro")


def parse_env(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=value`, or `NAME` for the value it has here."""
    variables: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not re.fullmatch(VARIABLE, name):
            raise UsageError(f"'{text}' sets no variable", "write NAME=value")
        if equals or name in os.environ:
            variables[name] = value if equals else os.environ[name]
    return variables


def check_squashfs(path: Path) -> None:
    if path.is_fifo() or path.is_char_device() or path.is_socket():
        raise UsageError(f"{path} is no file", "name a squashfs file")
    try:
        with path.open("rb") as file:
            magic = file.read(len(SQUASHFS_MAGIC))
    except FileNotFoundError:
        raise UsageError(f"no squashfs at {path}", "make it first: ./build.py sqsh") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder", "name a squashfs file") from None
    if magic != SQUASHFS_MAGIC:
        raise UsageError(f"{path} is no squashfs", "make it again: ./build.py sqsh")


def _run_in_enroot(container: Container) -> Ended:
    words = ["enroot", "start", "--root", "--rw"]
    for mount in container.mounts:
        options = "bind,ro" if mount["read_only"] else "rbind,rw"
        words += ["--mount", f"{mount['source']}:{mount['target']}:none:x-create=auto,{options}"]
    for name, value in container.env.items():
        words += ["--env", f"{name}={value}"]
    settings = {"ENROOT_UNSHARE_PID": "y", **({} if container.host_network else {"ENROOT_UNSHARE_NET": "y"})}
    process = subprocess.Popen(
        [*words, str(container.squashfs), *container.command],
        env={**os.environ, **settings},
        stdin=None if container.terminal else subprocess.DEVNULL,
    )
    return _wait(process, process.send_signal, container.stop_within_s)


def _run_in_namespaces(container: Container) -> Ended:
    if os.geteuid() == 0:
        base = state_dir() / "container"
        base.mkdir(parents=True, exist_ok=True)
        return _run_on_root(container, base, rootless=False, unpacked=None)
    check_user_namespaces()
    with prepared_root(container.squashfs, state_dir()) as unpacked:
        return _run_on_root(container, Path("/dev/shm"), rootless=True, unpacked=unpacked)


def _run_on_root(container: Container, base: Path, *, rootless: bool, unpacked: Path | None) -> Ended:
    spec = Spec(
        squashfs=str(container.squashfs.absolute()),
        base=str(base),
        rootless=rootless,
        unpacked=str(unpacked) if unpacked else None,
        mounts=list(container.mounts),
        env=dict(container.env),
        command=list(container.command),
        host_network=container.host_network,
        interactive=container.terminal and _owns_terminal(),
    )
    with (
        tempfile.TemporaryFile() as spec_file,
        tempfile.TemporaryFile() as report,
        _kept_terminal(spec["interactive"]),
        _pipe() as (inner, outer),
    ):
        spec_file.write(json.dumps(spec).encode())
        spec_file.flush()
        process = subprocess.Popen(
            _init_command(spec, spec_file.fileno(), inner, report.fileno()),
            stdin=None if container.terminal else subprocess.DEVNULL,
            pass_fds=(spec_file.fileno(), inner, report.fileno()),
            process_group=0,  # so that what a terminal sends to our group does not hit the helpers
        )
        ended = _wait(process, lambda number: _send(outer, number), container.stop_within_s)
        report.seek(0)
        if ended.status == SETUP_FAILED and (problem := report.read().decode()):
            raise KitError(f"the container could not start: {problem}")
    return ended


def _init_command(spec: Spec, *handles: int) -> list[str]:
    return [
        "unshare", "--mount", "--pid", "--ipc", "--uts",
        *(["--user", "--map-root-user"] if spec["rootless"] else []),
        *([] if spec["host_network"] else ["--net"]),
        "--fork",
        "--kill-child",  # should unshare itself be killed
        sys.executable, "-I", "-S", "-c", INIT, str(REPO), *(str(handle) for handle in handles),
    ]  # fmt: skip


def _wait(process: subprocess.Popen[bytes], send: Callable[[int], None], stop_within_s: float | None) -> Ended:
    """Wait for `process`, while signals that would end us go to `send`, and kill it when it takes too long."""
    timers: list[threading.Timer] = []
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        send(number)
        received.append(number)
        if stop_within_s is not None and not timers:
            timers.append(threading.Timer(stop_within_s, process.kill))
            timers[0].start()

    try:
        with _handled(PASSED_ON, pass_on):
            status = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        for timer in timers:
            timer.cancel()
    return Ended(status if status >= 0 else 128 - status, interrupted=not ENDING.isdisjoint(received))


def _send(control: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(control, f"{number}\n".encode())


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    earlier = {
        number: signal.signal(number, handler) for number in numbers if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, former in earlier.items():
            signal.signal(number, former)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    inner, outer = os.pipe()
    try:
        yield inner, outer
    finally:
        os.close(inner)
        os.close(outer)


def _owns_terminal() -> bool:
    return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()


@contextmanager
def _kept_terminal(owned: bool) -> Iterator[None]:
    """Take the terminal back from the command at its end, with the settings it had."""
    if not owned:
        yield
        return
    settings = termios.tcgetattr(0)
    try:
        yield
    finally:
        former = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpgrp())
        termios.tcsetattr(0, termios.TCSADRAIN, settings)
        signal.signal(signal.SIGTTOU, former)

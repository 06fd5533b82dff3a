"""The kit's own services: Docker's engine and a registry, on this machine only, identified by process ID.

All their files are in the state folder, so two clones do not share anything; the registry listens on loopback, on a
port that was free. `engine` and `registry` say how long each runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kit.command import last_lines, run
from kit.errors import KitError, UsageError
from kit.files import write_atomic
from kit.layout import REPO, state_dir
from kit.steps import complete_step, say

STATE_VERSION = "1"
"""ci/bootstrap.sh writes it to .state/version; incremented when an older state folder no longer works."""

_SOCKET_ROOM = 60  # longest folder in which containerd's sockets stay below the kernel's 108 characters


@dataclass(frozen=True)
class Docker:
    """How to call a Docker that has the features the build needs."""

    program: Path
    env: Mapping[str, str]
    own: bool

    def argv(self, *words: str | Path) -> list[str | Path]:
        return [self.program, *words]


@contextmanager
def engine() -> Iterator[Docker]:
    """Yield a Docker for the body: this machine's own where it has the features, else ours, stopped after the body.

    One that runs already, because `start_services` started it or KEEP is set, is used and left running.
    """
    docker = _docker()
    started = docker.own and not _ENGINE.running()
    if started:
        _start_engine()
    try:
        yield docker
    finally:
        if started and not os.environ.get("KEEP"):
            stop_engine()


def check_engine() -> None:
    """Raise KitError if there will be no Docker to build with; called before the inputs are fetched."""
    if _docker().own and os.geteuid() != 0:
        raise KitError(
            "Docker's engine runs as root only", "run it as root, or install a Docker that can build (README)"
        )


def registry() -> str:
    """The address (host:port) of our registry, started if necessary. It runs until `stop_services`."""
    if not _REGISTRY.running():
        _start_registry()
    return f"127.0.0.1:{_registry_port()}"


def share_blobs(oci: Path) -> None:
    """Replace our registry's copies of a layout's blobs by hard links to the layout's: one copy on disk, not two."""
    store = state_dir() / "registry/data/docker/registry/v2/blobs/sha256"
    for blob in (oci / "blobs/sha256").iterdir():
        held = store / blob.name[:2] / blob.name / "data"
        if not held.exists() or held.samefile(blob) or held.stat().st_size != blob.stat().st_size:
            continue
        link = held.with_name(".link")
        link.unlink(missing_ok=True)
        try:
            link.hardlink_to(blob)
        except OSError:  # another file system
            return
        link.replace(held)


def start_services() -> None:
    if _docker().own and not _ENGINE.running():
        _start_engine()
    registry()


def stop_services() -> list[str]:
    """Stop the services and return the names of those that ran."""
    stopped = []
    if _REGISTRY.stop():
        stopped.append("registry")
    if stop_engine():
        stopped.append("Docker engine")
    return stopped


def control_services(action: str, json_answer: bool = False) -> None:
    """Run `./build.py services ACTION`; `status` and `env` print their result on stdout."""
    if action == "start":
        start_services()
    elif action == "stop":
        say(f"stopped: {', '.join(stop_services()) or 'nothing ran'}")
    elif action == "env":
        for name, value in docker_environment().items():
            print(f"export {name}={shlex.quote(value)}")
    elif action == "status":
        status = services_status()
        if json_answer:
            print(json.dumps(status, indent=2))
            return
        for name, service in status.items():
            up = f"process {service['pid']}, {service['address']}"
            print(f"{name}: {up if service['running'] else 'not running'}")
    else:
        raise UsageError(f"unknown action '{action}'", "use start, stop, status or env")


def services_status() -> dict[str, dict[str, object]]:
    """For each service whether it runs, its process ID and its address."""
    engine_socket = f"unix://{_run_dir() / 'docker.sock'}"
    port = _registry_port() if (state_dir() / "registry/port").exists() else None
    return {
        "engine": {"running": _ENGINE.running(), "pid": _ENGINE.pid(), "address": engine_socket},
        "registry": {"running": _REGISTRY.running(), "pid": _REGISTRY.pid(), "address": f"127.0.0.1:{port}"},
    }


def docker_environment() -> dict[str, str]:
    """Environment variables for a `docker buildx build` typed by hand to use our engine."""
    docker = _docker()
    return {**docker.env, "PATH": f"{docker.program.parent}:{os.environ['PATH']}"} if docker.own else {}


def content_store() -> Path:
    """The folder of our engine's blobs, organised as in an OCI layout."""
    return state_dir() / "docker/containerd/daemon/io.containerd.content.v1.content"


def stop_engine() -> bool:
    stopped = _ENGINE.stop()
    folder = _run_dir()
    if stopped and folder.parent != state_dir():
        shutil.rmtree(folder, ignore_errors=True)
    return stopped


@dataclass(frozen=True)
class _Daemon:
    """A process that outlives us, identified by its ID and start time, so that a reused ID is not mistaken for it."""

    name: str

    @property
    def file(self) -> Path:
        return state_dir() / "services" / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return state_dir() / "services" / f"{self.name}.log"

    def pid(self) -> int | None:
        try:
            known = json.loads(self.file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        pid: int = known["pid"]
        started = _start_time(pid)
        return pid if started is not None and started == known["started"] else None

    def running(self) -> bool:
        return self.pid() is not None

    def start(self, argv: Sequence[str | Path], env: Mapping[str, str], ready: Callable[[], bool]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            try:
                process = subprocess.Popen(
                    [str(word) for word in argv],
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise KitError(f"cannot start the {self.name}: {error}", "run ci/bootstrap.sh --yes") from error
        write_atomic(self.file, json.dumps({"pid": process.pid, "started": _start_time(process.pid)}) + "\n")
        deadline = time.monotonic() + 60
        try:
            while not ready():
                if process.poll() is not None:
                    said = last_lines(self.log.read_text(errors="replace"), 2)
                    raise KitError(f"the {self.name} ended at once: {said}", f"see {self.log}")
                if time.monotonic() > deadline:
                    raise KitError(f"the {self.name} is not ready after 60 s", f"see {self.log}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> bool:
        """Stop it, with SIGKILL after 20 s; whether it was running."""
        pid = self.pid()
        if pid is None:
            self.file.unlink(missing_ok=True)
            return False
        started = _start_time(pid)
        for sign, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
            with suppress(ProcessLookupError):
                os.kill(pid, sign)
            deadline = time.monotonic() + patience
            while _start_time(pid) == started and time.monotonic() < deadline:
                time.sleep(0.05)
            if _start_time(pid) != started:
                break
        self.file.unlink(missing_ok=True)
        return True


_ENGINE = _Daemon("engine")
_REGISTRY = _Daemon("registry")


def _prepare() -> None:
    """Unpack the programs of our services. The system gets nothing but, with CI=true, missing packages."""
    with complete_step("Prepare this machine"):
        finished = run([REPO / "ci/bootstrap.sh"], check=False)
        if finished.returncode != 0:
            raise KitError(last_lines(finished.stderr, 1).removeprefix("error: "))


def _docker() -> Docker:
    """The Docker that ci/bootstrap.sh chose."""
    kind = state_dir() / "engine.kind"
    if not kind.exists():
        _prepare()
    version = state_dir() / "version"
    if not version.exists() or version.read_text().strip() != STATE_VERSION:
        raise KitError(f"{state_dir()} is of another version of the kit", "remove it with ./build.py clean --all")
    if kind.read_text().strip() == "host":
        return Docker(Path(shutil.which("docker") or "docker"), {}, own=False)
    program = state_dir() / "engine/usr/bin/docker"
    env = {"DOCKER_HOST": f"unix://{_run_dir() / 'docker.sock'}", "DOCKER_CONFIG": str(state_dir() / "docker-config")}
    return Docker(program, env, own=True)


def _start_engine() -> None:
    state, folder = state_dir(), _run_dir()
    folder.mkdir(parents=True, exist_ok=True)
    plugins = state / "docker-config/cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    buildx = plugins / "docker-buildx"
    buildx.unlink(missing_ok=True)
    buildx.symlink_to(state / "engine/usr/libexec/docker/cli-plugins/docker-buildx")
    config = {
        "data-root": str(state / "docker"),
        "exec-root": str(folder / "exec"),
        "pidfile": str(folder / "docker.pid"),
        "hosts": [f"unix://{folder / 'docker.sock'}"],
        "features": {"containerd-snapshotter": True},  # needed for OCI output and for digests without a push
        # No network of its own: builds need none, and the machine's firewall stays as it is.
        "bridge": "none",
        "iptables": False,
        "ip6tables": False,
        "insecure-registries": ["127.0.0.0/8"],
        "builder": {"gc": {"enabled": True, "defaultKeepStorage": "20GB"}},
        "shutdown-timeout": 5,
    }
    write_atomic(state / "services/daemon.json", json.dumps(config, indent=1) + "\n")
    for stale in (folder / "docker.pid", folder / "exec/containerd/containerd.pid"):
        stale.unlink(missing_ok=True)
    found = (state / "engine/usr/sbin", state / "engine/usr/bin", state / "runtime/usr/sbin", state / "runtime/usr/bin")
    path = ":".join([*map(str, found), os.environ["PATH"]])
    with complete_step("Start Docker's engine"):
        docker = _docker()
        _ENGINE.start(
            [state / "engine/usr/sbin/dockerd", f"--config-file={state / 'services/daemon.json'}"],
            {"PATH": path},
            lambda: run(docker.argv("version"), env=docker.env, check=False).returncode == 0,
        )


def _start_registry() -> None:
    folder = state_dir() / "registry"
    program = state_dir() / "runtime/usr/bin/docker-registry"
    if not program.exists():
        _prepare()
    if not program.exists():
        raise KitError("there is no registry of our own here", "run ci/bootstrap.sh --yes on Debian, or set REGISTRY")
    port = _free_port(_registry_port() if (folder / "port").exists() else 0)
    write_atomic(folder / "port", f"{port}\n")
    config = f"""version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {json.dumps(str(folder / "data"))}}}
  delete: {{enabled: true}}
http: {{addr: 127.0.0.1:{port}}}
"""
    write_atomic(folder / "config.yml", config)
    with complete_step("Start the registry") as step:
        _REGISTRY.start([program, "serve", folder / "config.yml"], {}, lambda: _answers(f"http://127.0.0.1:{port}/v2/"))
        step.note(f"127.0.0.1:{port}")


def _registry_port() -> int:
    return int((state_dir() / "registry/port").read_text())


def _free_port(wanted: int) -> int:
    """`wanted` if it is free, so that references stay valid, else any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            chosen: int = probe.getsockname()[1]
            return chosen
    raise KitError("no free port on 127.0.0.1", "end something that listens there")


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for loopback
    try:
        with opener.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _run_dir() -> Path:
    """The folder of the engine's sockets: in the state folder, or in the temporary one where that path is too long."""
    folder = state_dir() / "run"
    if len(str(folder)) <= _SOCKET_ROOM:
        return folder
    return Path(tempfile.gettempdir()) / f"kit-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def _start_time(pid: int) -> str | None:
    """Field 22 of /proc/PID/stat; None for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]

"""NeMo RL's processes: a Ray head of the run's own, and its script, with their environment, log and deadline."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from functional.runtime.errors import RunError
from functional.runtime.fleet.sockets import ListeningSocket, listening_sockets
from functional.suite.cluster import ADDRESS_VARIABLE, cluster_address
from functional.suite.nemo_rl.place import DYNAMO_VARIABLE, NemoRl

WORKER_VENVS = "NEMO_RL_VENV_DIR"
RUN_VARIABLE = "FUNCTIONAL_RUN"
"""All processes of the run have it, on whatever node: the run's folder."""
ACTORS = (
    "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker",
    "nemo_rl.algorithms.async_utils.AsyncTrajectoryCollector",
    "nemo_rl.algorithms.async_utils.ReplayBuffer",
)
"""Actors that get an environment each, made by uv unless it is there: GRPO, DTensor v1 and Dynamo have these."""
LOGICAL_CPUS = 16
"""Ray hands these out to the actors of a recipe, which mostly wait; a small machine has fewer than they ask for."""
SLOW_MACHINE = {"RAY_agent_register_timeout_ms": "120000"}
"""Ray gives its agents a few seconds to start, too few on a busy two-core machine."""
HEAD_WAIT_S = 300.0
GRACE_S = 60.0
"""For NeMo RL's own shutdown; its parts have 15 s each."""
SAMPLE_S = 2.0
LAST_LINES_S = 5.0


@dataclass(frozen=True)
class Ended:
    """How the script ended. status: its exit status, -N after signal N; is_late: it was stopped at the deadline."""

    status: int
    is_late: bool
    seconds: float
    sockets: list[ListeningSocket]


def make_environment(place: NemoRl, run_dir: Path) -> dict[str, str]:
    """The variables of Ray's head and of the script.

    Makes the folders that it names. What the caller has set of Hugging Face, and of where worker environments are,
    stays.
    """
    temporary = run_dir / "tmp"
    temporary.mkdir(exist_ok=True)
    found = dict(os.environ)
    found.setdefault("HF_HUB_OFFLINE", "1")
    found.setdefault("HF_DATASETS_CACHE", str(run_dir / "datasets"))
    if WORKER_VENVS not in found:
        found[WORKER_VENVS] = str(link_environments(place, run_dir / "venvs"))
    found |= {
        RUN_VARIABLE: str(run_dir),
        DYNAMO_VARIABLE: str(place.dynamo_venv),
        "VIRTUAL_ENV": str(place.python.parents[1]),
        "PATH": os.pathsep.join([str(place.python.parent), found.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(place.tree), found.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "RAY_DEDUP_LOGS": "0",  # lines are counted
        "TMPDIR": str(temporary),  # where it makes the data folders of etcd and NATS
    }
    return found


def shared_gpu(gpus: int) -> dict[str, str]:
    """Variables with which each of Ray's `gpus` GPUs is this machine's first one.

    Ray maps the GPUs that it hands out through the list; trainer and worker are NCCL ranks of one GPU then, which needs
    NCCL 2.30.7.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(["0"] * gpus), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def link_environments(place: NemoRl, folder: Path) -> Path:
    """A folder in which each actor finds NeMo RL's environment under its own name; returns it."""
    folder.mkdir(exist_ok=True)
    for actor in ACTORS:
        (folder / actor).symlink_to(place.python.parents[1])
    return folder


@contextmanager
def ray_head(
    place: NemoRl, environment: dict[str, str], run_dir: Path, log: Path, gpus: int | None
) -> Iterator[dict[str, str]]:
    """A Ray head of this machine, as `ray.sub` starts one; yields the environment that names it.

    The cluster that RAY_ADDRESS names is taken as it is. NeMo RL by itself joins whatever cluster it sees on the
    machine. gpus: how many the head offers; those that Ray finds, if None. Raises RunError when it does not come up.
    """
    if cluster_address() is not None:
        yield environment
        return
    folder = run_dir / "ray"
    command = [str(place.python), "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    command += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    command += [f"--num-cpus={max(LOGICAL_CPUS, os.cpu_count() or 1)}"]
    if gpus is not None:
        command.append(f"--num-gpus={gpus}")
    with log.open("wb") as output:
        head = subprocess.Popen(
            command, env=environment | SLOW_MACHINE, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    try:
        yield environment | {ADDRESS_VARIABLE: await_head(head, folder / "ray_current_cluster", log)}
    finally:
        stop(head, signal.SIGTERM, 20.0)


def await_head(head: subprocess.Popen[bytes], file: Path, log: Path) -> str:
    """The head's address once it answers. Raises RunError when it ends, or does not come up in time."""
    deadline = time.monotonic() + HEAD_WAIT_S
    while time.monotonic() < deadline:
        if head.poll() is not None:
            raise RunError(f"Ray's head ended with status {head.returncode}: {last_line(log)} (log: {log})")
        with suppress(OSError, ValueError):
            host, _, port = file.read_text(encoding="utf-8").strip().rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
            return f"{host}:{port}"
        time.sleep(0.2)
    raise RunError(f"Ray's head did not come up within {HEAD_WAIT_S:.0f} s: {last_line(log)} (log: {log})")


def run_script(
    place: NemoRl,
    words: list[str],
    environment: Mapping[str, str],
    deadline_s: float,
    heard: Callable[[str], None],
) -> Ended:
    """Run the unmodified script to its end or the deadline. heard: gets each line of its output as it comes, and none
    once this returns; what it raises ends the script, and is raised here.

    Its folder is the tree, as prompts and recipes are named relative to it.
    """
    began = time.monotonic()
    script = subprocess.Popen(
        [str(place.python), "-u", str(place.script), *words],
        cwd=place.tree,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
    )
    assert script.stdout is not None
    output = Output(script.stdout, heard)
    seen: dict[tuple[str, int], ListeningSocket] = {}
    is_late = False
    try:
        while script.poll() is None and not is_late and output.failure is None:
            with suppress(OSError, psutil.Error):  # what is only looked at must not end a run
                seen |= {(found.address, found.port): found for found in listening_sockets()}
            is_late = time.monotonic() > began + deadline_s
            with suppress(subprocess.TimeoutExpired):
                script.wait(SAMPLE_S)
    finally:
        try:
            stop(script, signal.SIGINT, GRACE_S)
        finally:
            output.close()
    if output.failure is not None:
        raise output.failure
    return Ended(script.wait(), is_late, time.monotonic() - began, list(seen.values()))


class Output:
    """Passes on a script's lines from a thread of its own. failure: what came of one that could not be passed on; those
    after it are dropped, but read, as the script would wait for a pipe that is full."""

    def __init__(self, stream: IO[str], heard: Callable[[str], None]) -> None:
        self.failure: Exception | None = None
        self._stream = stream
        self._heard = heard
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the end of the output, but not for that of a process that was left behind and still holds the pipe:
        what that writes is passed on no more."""
        self._thread.join(LAST_LINES_S)
        with self._lock:
            self._is_closed = True

    def _read(self) -> None:
        for line in self._stream:
            with self._lock:
                if self._is_closed or self.failure is not None:
                    continue
                try:
                    self._heard(line.rstrip("\n"))
                except Exception as failure:
                    self.failure = failure


def stop(process: "subprocess.Popen[bytes] | subprocess.Popen[str]", signum: int, grace_s: float) -> None:
    """Signal the process, and kill it when it has not ended `grace_s` seconds later."""
    if process.poll() is not None:
        return
    process.send_signal(signum)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"

"""A run on two nodes of a Ray cluster that it did not start: two network namespaces, each with the image in it.

The trainer is on one, engines are on both. Another user of the second node tries every port of the first.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import strangers

REPO = Path(__file__).resolve().parents[2]
SQUASHFS = REPO / "dist" / os.environ.get("NAME", "cpu") / f"{os.environ.get('NAME', 'cpu')}.sqsh"
NOBODY = "65534"
RUN_S = 240.0
RAY = ("raylet", "gcs_server", "ray::", "/ray/")
"""By which a command line is known to be one of Ray's own."""
UNPROTECTED = {"dynamo.vllm", "dynamo.frontend", "ray::Trainer"}
"""Whose ports take a stranger's connection off their node: Dynamo's request plane and response streams, and the
rendezvous and the transfer of an update; docs/cluster.md says what each gives away."""

pytestmark = [pytest.mark.image, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces take root")]


class Cluster:
    """Two nodes, their addresses, and the folder that both have."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self.names = [f"rl{os.getpid()}-{number}" for number in (1, 2)]
        self.addresses = ["10.231.7.1", "10.231.7.2"]
        self.processes: list[subprocess.Popen[str]] = []

    def up(self) -> None:
        ends = [f"rl{os.getpid()}v{number}" for number in (1, 2)]
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = self.names
        ip("link", "add", ends[0], "netns", first, "type", "veth", "peer", "name", ends[1], "netns", second)
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")

    def down(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.communicate(timeout=60)
        for name in self.names:
            ip("netns", "del", name)

    def start(self, number: int, *words: str) -> subprocess.Popen[str]:
        """A node: the head (0) runs `words`, the other one joins."""
        runner = [sys.executable, str(REPO / "build.py"), "run", "--engine", "own", "--sqsh", str(SQUASHFS)]
        for name in ("functional", "tests"):
            runner += ["--mount", f"{REPO / name}:/src/{name}:ro"]
        runner += ["--mount", f"{self.shared}:/shared"]
        runner += ["--env", f"NODE_IP={self.addresses[number]}", "--env", f"HEAD={self.addresses[0]}:6379"]
        command = [*self._inside(number), *runner, "--", "bash", "/src/tests/functional/node.sh", f"node{number + 1}"]
        log = (self.shared / f"node{number + 1}.log").open("w")
        with log:
            self.processes.append(
                subprocess.Popen([*command, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
            )
        return self.processes[-1]

    def pids(self, number: int) -> list[int]:
        """Every process with this node's network, whatever other namespaces it has."""
        done = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]

    def listeners(self, number: int) -> list[tuple[str, str]]:
        """«address:port» of each socket that listens on a node, and its owner's command line."""
        done = self._run(number, "ss", "-Hltnp")
        found = []
        for line in done.stdout.splitlines():
            place, pid = line.split()[3], line.partition("pid=")[2].partition(",")[0]
            found.append((place, command_line(int(pid)) if pid else ""))
        return found

    def as_stranger(self, number: int, places: list[str]) -> dict[str, dict[str, Any]]:
        """What another user of this node gets at these places."""
        script = Path(strangers.__file__).read_text(encoding="utf-8")
        dropped = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "/usr/bin/python3", "-c"]
        done = self._run(number, *dropped, script, *places)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        return {answer["place"]: answer for answer in answers}

    def _run(self, number: int, *words: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run([*self._inside(number), *words], capture_output=True, text=True, cwd="/", timeout=120)
        assert done.returncode == 0, done.stderr
        return done

    def _inside(self, number: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[number]]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


def command_line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if not SQUASHFS.exists():
        pytest.skip(f"no {SQUASHFS}: make image sqsh")
    made = Cluster(tmp_path / "shared")
    made.shared.mkdir()
    token = made.shared / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    made.up()
    try:
        yield made
    finally:
        made.down()


def test_a_run_on_two_nodes(cluster: Cluster) -> None:
    out = cluster.shared / "out"
    recipe = ["functional/recipes/grpo_cpu.yaml", "cluster.num_nodes=2", "grpo.max_num_steps=1"]
    cluster.start(1)
    run = cluster.start(0, "2", "python", "-m", "functional.suite.cli", "run", *recipe, "--out", "/shared/out")
    await_event(run, out / "events.jsonl", "step 1: generating")

    listeners = cluster.listeners(0)
    variables = environment_of(cluster.pids(0), "dynamo.frontend")
    reached = tries(cluster, listeners)
    assert run.wait(RUN_S) == 0, (cluster.shared / "node1.log").read_text()[-4000:]

    report = json.loads((out / "report.json").read_text())
    assert report["status"] == "passed"
    places = report["topology"]["nodes"]
    assert [(place["name"], place["address"], place["has_trainer"], place["engines"]) for place in places] == [
        ("node1", "10.231.7.1", True, [0]),
        ("node2", "10.231.7.2", False, [1]),
    ]
    check_reached(listeners, reached)
    check_secrets(variables, out)
    left = {number: ours(cluster.pids(number)) for number in (0, 1)}
    assert not left[1], left


def tries(cluster: Cluster, listeners: list[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """What a stranger on the second node gets at each port of the first, and one on the first at its loopback."""
    own = [place for place, command in listeners if not any(word in command for word in RAY) or "Trainer" in command]
    near = [place for place in own if place.startswith("127.")]
    far = [f"{cluster.addresses[0]}:{place.rpartition(':')[2]}" for place, _ in listeners]
    return cluster.as_stranger(0, near) | cluster.as_stranger(1, far)


def check_reached(listeners: list[tuple[str, str]], reached: dict[str, dict[str, Any]]) -> None:
    for place, command in listeners:
        port = place.rpartition(":")[2]
        far = reached[f"10.231.7.1:{port}"]
        assert far["refused"], (command, far)
        is_open = "ConnectionRefusedError" not in far["tries"]["nats"]
        is_wild = place.startswith(("0.0.0.0", "*", "[::]"))
        is_rays = any(word in command for word in RAY)
        if is_wild:
            assert is_rays or "functional.suite" in command, (place, command)  # a Ray driver is Ray's server too
        if place.startswith("127."):
            assert not is_open, (place, command)
        for program in ("etcd", "nats-server"):
            if Path(command.split(" ")[0]).name == program and is_open:
                assert "refused" in far


def check_secrets(variables: dict[str, str], out: Path) -> None:
    """The run's credentials are in no file that it leaves."""
    words = [variables["NATS_AUTH_PASSWORD"], variables["ETCD_AUTH_CLIENT_KEY"].splitlines()[1], "PRIVATE KEY"]
    for path in (path for path in out.rglob("*") if path.is_file()):
        text = path.read_text(errors="replace")
        assert not [word for word in words if word in text], path


def environment_of(pids: list[int], program: str) -> dict[str, str]:
    pid = next(pid for pid in pids if f"-m {program}" in command_line(pid) and "guard.py" not in command_line(pid))
    return psutil.Process(pid).environ()


def ours(pids: list[int]) -> list[str]:
    """Command lines that a run would have left."""
    lines = [command_line(pid) for pid in pids]
    return [line for line in lines if any(word in line for word in ("dynamo", "etcd", "nats-server", "functional."))]


def await_event(run: "subprocess.Popen[str]", events: Path, name: str) -> None:
    deadline = time.monotonic() + RUN_S
    while not (events.exists() and f'"{name}"' in events.read_text()):
        assert run.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, f"no «{name}»"
        time.sleep(0.1)

"""What can go wrong with a job: it ends within its deadline, says what and where, and leaves nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.slurm.conftest import local, submit

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.usefixtures("nothing_left")]


@contextmanager
def mounted(node: str, *words: str) -> Iterator[None]:
    """Something mounted over a folder of one node; `words` end with the folder."""
    local("run", "-n", node, "mount", *words)
    try:
        yield
    finally:
        local("run", "-n", node, "umount", "--lazy", words[-1])


def test_a_worker_node_dies() -> None:
    job = submit("sleep 600", settings={"LOST_AFTER_S": "6"})
    job.wait_for("command")
    died = time.monotonic()
    local("fail", "node2")
    try:
        while not job.reason:
            assert time.monotonic() - died < 20, job.log
            time.sleep(0.2)
        assert "node2 has not answered for" in job.reason or "node2 left the cluster" in job.reason
    finally:
        local("start", "node2")
    state, code = job.wait(90)
    assert (state, code) == ("FAILED", "70:0")


def test_a_worker_step_dies() -> None:
    job = submit("sleep 600")
    job.wait_for("command")
    local("run", "-n", "node2", "pkill", "-KILL", "-f", "ray_node.py worker")
    assert job.wait(40) == ("FAILED", "70:0")
    assert "node2" in job.reason


@pytest.mark.parametrize("phase", ["queued", "nodes", "containers", "ray head", "cluster"])
def test_cancelled_in_each_phase(phase: str) -> None:
    job = submit("sleep 600")
    job.wait_for(phase)
    job.cancel()
    assert job.wait(40)[0] == "CANCELLED"


def test_a_raylet_that_ends_while_ray_starts() -> None:
    """As it does on a busy machine, by a deadline of Ray's own."""
    job = submit("python -c 'import ray; ray.init(); print(len(ray.nodes()))'")
    job.wait_for("container")
    deadline = time.monotonic() + 60
    while local("run", "-n", "node1", "pkill", "-KILL", "-x", "raylet", check=False).returncode:
        assert time.monotonic() < deadline, job.log
    assert job.wait() == ("COMPLETED", "0:0"), job.log
    assert "The raylet ended while Ray was starting" in (job.logs / "ray-node1.log").read_text()
    assert (job.logs / "driver.log").read_text().splitlines()[-1] == "2"


def test_cancelled_while_pending() -> None:
    job = submit("sleep 600", "--hold")
    job.cancel()
    assert job.wait(10)[0] == "CANCELLED"


def test_the_command_is_warned_of_the_time_limit() -> None:
    """Slurm looks at limits every half a minute or so, and signals a minute earlier at most."""
    script = "trap 'echo warned; exit 9' TERM; while :; do sleep 0.2; done"
    job = submit(script, "--time=2", "--signal=B:USR1@45", nodes=1)
    assert job.wait(200) == ("FAILED", "9:0")
    assert "warned" in (job.logs / "driver.log").read_text()
    assert "warning" in [phase["phase"] for phase in job.phases]


def test_the_time_limit_ends_a_command_that_does_not() -> None:
    job = submit("trap '' TERM; sleep 600", "--time=1", "--signal=B:USR1@5", nodes=1)
    assert job.wait(200)[0] == "TIMEOUT"


def test_squashfs_missing_on_one_node() -> None:
    with mounted("node2", "-t", "tmpfs", "tmpfs", "/srv/images"):
        job = submit("true")
        assert job.wait(60) == ("FAILED", "70:0")
    assert job.reason.startswith("node2: there is no /srv/images/cpu.sqsh here")


def test_log_folder_that_one_node_does_not_share() -> None:
    with mounted("node2", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/srv/alice"):
        job = submit("true", settings={"SHARED_DEADLINE_S": "3"})
        assert job.wait(60) == ("FAILED", "70:0")
    assert "node2: does not see the job's files in" in job.reason


def test_ports_taken_and_a_wide_ephemeral_range() -> None:
    """All of a block's ports but one job's: it takes the next block, below the range."""
    local("run", "-n", "node1", "sysctl", "-qw", "net.ipv4.ip_local_port_range=9000 65000")
    script = (
        "import socket,time; held=[socket.create_server(('0.0.0.0', p)) for p in range(1100, 5000)]; time.sleep(60)"
    )
    try:
        local(
            "run",
            "-n",
            "node1",
            "bash",
            "-c",
            f'ulimit -n 8000; setsid python3 -c "{script}" </dev/null >/dev/null 2>&1 &',
        )
        job = submit('echo "at $RAY_ADDRESS"; python -c "import ray; ray.init()"', nodes=1)
        assert job.wait() == ("COMPLETED", "0:0"), job.log
        port = int((job.logs / "driver.log").read_text().split("at 10.0.0.1:")[1].split()[0])
        assert 5000 <= port < 9000 or port > 65000
    finally:
        local("run", "-n", "node1", "pkill", "-KILL", "-f", "import socket,time")
        local("run", "-n", "node1", "sysctl", "-qw", "net.ipv4.ip_local_port_range=32768 60999")


def test_two_jobs_of_one_user_on_one_node() -> None:
    command = "python -c 'import ray; ray.init(); print(len(ray.nodes()))'"
    jobs = [
        submit(
            f"sleep 5; {command}",
            "--oversubscribe",
            "--cpus-per-task=2",
            "--mem=4G",
            "--nodelist=node1",
            nodes=1,
            gpus=1,
        )
        for _ in range(2)
    ]
    for job in jobs:
        job.wait_for("command", 90)
    assert [job.state()[0] for job in jobs] == ["RUNNING", "RUNNING"]
    for job in jobs:
        assert job.wait() == ("COMPLETED", "0:0"), job.log
        assert (job.logs / "driver.log").read_text().splitlines()[-1] == "1"


def test_scratch_that_a_killed_job_left_is_removed_by_the_next() -> None:
    local("run", "-n", "node1", "-u", "alice", "mkdir", "-p", "/tmp/functional-999-0/tmp")
    job = submit("ls -d /tmp/functional*", nodes=1)
    assert job.wait()[0] == "COMPLETED", job.log


def test_without_squashfuse_it_is_unpacked() -> None:
    with mounted("node1", "--bind", "/dev/null", "/usr/bin/squashfuse"):
        job = submit("functional --help >/dev/null", "--nodelist=node1", nodes=1)
        assert job.wait(400) == ("COMPLETED", "0:0"), job.log
    assert "unpacking /srv/images/cpu.sqsh" in job.log


def test_oci() -> None:
    script = "python -c 'import ray; ray.init(); print(len(ray.nodes()))'; exit 23"
    job = submit(script, "--nodelist=node1", nodes=1, settings={"CONTAINER_BACKEND": "oci"})
    assert job.wait(400) == ("FAILED", "23:0"), job.log
    assert (job.logs / "driver.log").read_text().splitlines()[-1] == "1"


def test_a_folder_on_the_nodes_own_disk() -> None:
    """Also while it is cancelled: the time that its keeper takes is not Slurm's to give."""
    job = submit("df /tmp | tail -1; sleep 600", nodes=1, settings={"SCRATCH": "/tmp"})
    job.wait_for("command")
    job.cancel()
    assert job.wait(60)[0] == "CANCELLED"
    assert "/dev/" in (job.logs / "driver.log").read_text()


def test_the_folder_is_gone_before_the_job_ends() -> None:
    job = submit("true", nodes=1, settings={"SCRATCH": "/tmp"})
    assert job.wait() == ("COMPLETED", "0:0"), job.log
    assert "not heard of at the end" not in job.output


def test_another_user_is_refused_at_every_port() -> None:
    script = """python - <<'PYTHON'
import ray, time
ray.init()
@ray.remote
class Actor:
    def up(self): return True
actor = Actor.remote()
print(ray.get(actor.up.remote()), flush=True)
time.sleep(600)
PYTHON"""
    job = submit(script, "--nodelist=node1", nodes=1)
    job.wait_for("command")
    deadline = time.monotonic() + 90
    while "True" not in (job.logs / "driver.log").read_text():
        assert time.monotonic() < deadline, job.log
        time.sleep(0.5)
    ports = ports_of_the_job()
    assert len(ports) > 5, ports
    words = [
        "python3",
        "-m",
        "kit.node_run",
        "--sqsh",
        "/srv/images/cpu.sqsh",
        "--mount",
        "/srv/kit/tests:/tests:ro",
        "--",
    ]
    words += ["python", "/tests/slurm/stranger.py", "10.0.0.1", *map(str, ports)]
    asked = local("run", "-n", "node2", "-u", "mallory", "env", "--chdir=/srv/kit", "PYTHONDONTWRITEBYTECODE=1", *words)
    answers = json.loads(asked.stdout)
    assert {int(port) for port in answers} == ports
    for port, said in answers.items():
        assert set(said.values()) & {"UNAUTHENTICATED", "401", "65 bytes, then the end"}, (port, said)
        assert not set(said.values()) & {"ANSWERED", "200"}, (port, said)
        assert all(line not in said.values() for line in ("DEADLINE_EXCEEDED",)), (port, said)
    secret = local("run", "-u", "mallory", "cat", f"/srv/alice/logs/{job.number}-logs/.job/token", check=False)
    assert secret.returncode != 0
    job.cancel()
    job.wait(40)


def ports_of_the_job() -> set[int]:
    """Where node1 listens off loopback, but for Slurm's own."""
    listening = local("run", "-n", "node1", "ss", "-Hltnp").stdout.splitlines()
    ours = [line.split()[3] for line in listening if not any(name in line for name in ("slurm", "srun"))]
    return {int(place.rpartition(":")[2]) for place in ours if "127.0.0.1" not in place}

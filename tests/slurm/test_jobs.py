"""Jobs of an ordinary user through ray.sub: the cluster, the exit code, cancelling."""

from __future__ import annotations

import json

import pytest

from tests.slurm.conftest import SHARED, Job, local, submit

pytestmark = [pytest.mark.slurm, pytest.mark.image, pytest.mark.usefixtures("nothing_left")]

TWO_NODES = """
python - <<'PYTHON'
import json, os, pathlib, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(log_to_driver=False)

@ray.remote(num_gpus=2)
def place():
    names = ("FUNCTIONAL_NODE_IP", "FUNCTIONAL_SCRATCH", "RAY_ADDRESS", "HOME")
    return {**{name: os.environ[name] for name in names}, "node": os.environ["SLURMD_NODENAME"]}

placed = [place.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in ray.nodes()]
places = ray.get(placed)
found = {"nodes": len(ray.nodes()), "gpus": ray.cluster_resources()["GPU"], "places": places}
found["secret"] = os.environ["SECRET"]
found["site's"] = [name for name in ("PYTHONPATH", "VIRTUAL_ENV", "BASH_ENV", "LC_ALL") if name in os.environ]
pathlib.Path(os.environ["FUNCTIONAL_OUT"], "found.json").write_text(json.dumps(found))
PYTHON
exit 23
"""


def test_two_nodes_and_the_commands_exit_code() -> None:
    of_the_site = dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV", "BASH_ENV"), "/apps/of/the/site")
    told = SHARED / "alice/told.json"
    told.write_text("{}\n")
    settings = {"SECRET": "handed on", "RELEASE_FACTS": "/srv/alice/told.json", **of_the_site}
    job = submit(TWO_NODES, settings=settings)
    assert job.wait() == ("FAILED", "23:0"), job.log
    assert (job.logs / "results/found.json").exists(), job.log
    found = json.loads((job.logs / "results/found.json").read_text())
    assert (found["nodes"], found["gpus"], found["secret"], found["site's"]) == (2, 4.0, "handed on", [])
    assert (job.logs / "results/release.json").read_text() == "{}\n"
    places = {place["node"]: place for place in found["places"]}
    assert {node: place["FUNCTIONAL_NODE_IP"] for node, place in places.items()} == {
        "node1": "10.0.0.1",
        "node2": "10.0.0.2",
    }
    assert {place["RAY_ADDRESS"].partition(":")[0] for place in found["places"]} == {"10.0.0.1"}
    names = [phase["phase"] for phase in job.phases]
    assert names[:2] == ["queued", "started"]
    assert names[-1] == "ended"
    assert {"nodes", "ray head", "ray worker", "cluster", "command"} < set(names)
    assert not (job.logs / ".job").exists(), "the token"
    assert (job.logs / "ray-node1.log").stat().st_size
    assert (job.logs / "ray-node2.log").stat().st_size


GUIDE = """
export CONTAINER=/srv/images/cpu.sqsh
export MOUNTS="$PWD:$PWD"
export SLURM_ACCOUNT=your-account
export SLURM_PARTITION=local
export GPUS_PER_NODE=2
export BASE_LOG_DIR="$PWD/results/dynamo-smoke/logs"
printf -v COMMAND '%q ' \\
  /opt/trainer_venv/bin/python -u "$PWD/an example.py" \\
  --config "$PWD/a recipe.yaml"
export COMMAND

sbatch \\
  --nodes=1 \\
  --gres="gpu:${GPUS_PER_NODE}" \\
  --exclusive \\
  --account="$SLURM_ACCOUNT" \\
  --partition="$SLURM_PARTITION" \\
  ray.sub
"""


def test_the_guides_block() -> None:
    """Verbatim but for the names and the command."""
    home = SHARED / "alice"
    (home / "an example.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1:])")
    (home / "ray.sub").symlink_to("/srv/kit/ray.sub")
    submitted = local("run", "-u", "alice", "env", "--chdir=/srv/alice", "bash", "-c", GUIDE)
    job = Job(submitted.stdout.split()[-1])
    assert job.wait() == ("COMPLETED", "0:0"), job.output
    said = (home / f"results/dynamo-smoke/logs/{job.number}-logs/driver.log").read_text()
    assert said == "/srv/alice ['--config', '/srv/alice/a recipe.yaml']\n"


def test_cancelled_while_the_command_runs() -> None:
    job = submit("touch /tmp/a-file; sleep 600")
    job.wait_for("command")
    job.cancel()
    assert job.wait(40)[0] == "CANCELLED"


def test_an_idle_cluster_and_its_attach_script() -> None:
    job = submit("", nodes=1)
    job.wait_for("command")
    script = f"/srv/alice/logs/{job.number}-logs/attach.sh"
    shown = local("run", "-u", "alice", script, "sh", "-c", 'echo "$RAY_ADDRESS"; ls /opt')
    assert shown.stdout.startswith("10.0.0.1:")
    assert "trainer_venv" in shown.stdout
    job.cancel()
    assert job.wait(40)[0] == "CANCELLED"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"CONTAINER": "/srv/images/none.sqsh"}, "node1: there is no /srv/images/none.sqsh here"),
        ({"MOUNTS": "/srv/none:/x"}, "there is no /srv/none here, which MOUNTS names"),
        ({"CONTAINER_BACKEND": "podman"}, "CONTAINER_BACKEND='podman' is unknown: pyxis, enroot, oci or runner"),
        ({"BASE_LOG_DIR": "/proc/logs"}, "cannot make /proc/logs"),
        ({"START_DEADLINE_S": "soon"}, "START_DEADLINE_S='soon' is no number of seconds"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, str], said: str) -> None:
    job = submit("true", nodes=1, settings=settings)
    assert job.wait(40) == ("FAILED", "70:0")
    assert said in job.output


@pytest.mark.full
def test_logs_of_a_job_that_runs_again_are_kept() -> None:
    """Slurm starts it again after two minutes."""
    job = submit("echo attempt $SLURM_RESTART_COUNT; sleep 600", "--requeue", nodes=1)
    job.wait_for("command")
    local("run", "-u", "alice", "scontrol", "requeue", job.number)
    again = SHARED / f"alice/logs/{job.number}-logs.restart1"
    second = Job(job.number)
    for _ in range(600):
        if (again / "driver.log").exists() and "attempt 1" in (again / "driver.log").read_text():
            break
        local("run", "sleep", "0.2")
    second.cancel()
    second.wait(40)
    assert "attempt" in (job.logs / "driver.log").read_text()
    assert "attempt 1" in (again / "driver.log").read_text()

"""pyxis and enroot as the job calls them. No package of the distribution: `stand_ins` has what jobs meet in them."""

from __future__ import annotations

import pytest

from tests.slurm.conftest import SHARED, Job, local, submit

pytestmark = [pytest.mark.slurm, pytest.mark.image, pytest.mark.usefixtures("nothing_left")]

OF_THE_SITE = ("LD_LIBRARY_PATH", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "BASH_ENV")
COMMAND = f"""
python - <<'PYTHON'
import os, ray
ray.init()
nodes = ray.remote(num_gpus=2)(lambda: os.environ["SLURMD_NODENAME"])
print("nodes", *sorted(ray.get([nodes.remote() for _ in ray.nodes()])))
print("site's", [name for name in {OF_THE_SITE} if os.environ.get(name, "").startswith("/apps")])
PYTHON
touch "$FUNCTIONAL_OUT/done"
until [ -e "$FUNCTIONAL_OUT/looked" ]; do sleep 0.2; done
exit 23
"""


def submit_to(backend: str, command: str, **settings: str) -> Job:
    of_the_site = dict.fromkeys(OF_THE_SITE, "/apps/of/the/site")
    path = "/srv/kit/tests/slurm/stand_ins:/usr/bin:/bin"
    return submit(command, settings={"CONTAINER_BACKEND": backend, "PATH": path, **of_the_site, **settings})


@pytest.mark.parametrize("backend", ["pyxis", "enroot"])
def test_two_nodes_their_names_and_a_shell_on_each(backend: str) -> None:
    job = submit_to(backend, COMMAND)
    try:
        job.wait_for("command")
        for node in ("node1", "node2"):
            script = f"/srv/alice/logs/{job.number}-logs/attach.sh"
            shown = local("run", "-u", "alice", script, "-n", node, "sh", "-c", 'echo "$SLURMD_NODENAME"; ls /opt')
            assert shown.stdout.split()[0] == node
            assert "trainer_venv" in shown.stdout
        results = job.logs / "results"
        for _ in range(200):
            if (results / "done").exists():
                break
            local("run", "sleep", "0.2")
        (results / "looked").touch()
        assert job.wait() == ("FAILED", "23:0"), job.log
    finally:
        job.cancel()
    said = (job.logs / "driver.log").read_text()
    assert "nodes node1 node2" in said
    assert "site's []" in said


@pytest.mark.parametrize("backend", ["pyxis", "enroot"])
def test_why_the_container_did_not_start(backend: str) -> None:
    (SHARED / "alice/bad.sqsh").write_text("no squashfs")
    job = submit_to(backend, "true", CONTAINER="/srv/alice/bad.sqsh")
    assert job.wait(40) == ("FAILED", "70:0")
    assert "the container did not start: node1: [ERROR] Invalid argument: /srv/alice/bad.sqsh" in job.reason

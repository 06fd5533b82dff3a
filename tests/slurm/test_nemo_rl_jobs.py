"""NeMo RL as a Slurm job: `functional run --driver nemo-rl` on the Ray cluster that `ray.sub` started."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from tests.nemo_rl_tree import write_runnable_tree
from tests.slurm.conftest import REPO, SHARED, Job, submit

pytestmark = [pytest.mark.slurm, pytest.mark.image, pytest.mark.usefixtures("nothing_left")]

# Joins the cluster as NeMo RL does, and leaves a process on the second node.
SCRIPT = """
import os, subprocess
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
print("Applied CLI overrides")
ray.init(address="auto", log_to_driver=False, runtime_env={"env_vars": dict(os.environ)})

@ray.remote(num_cpus=0)
class Worker:
    def where(self):
        import nemo_rl
        return ray.util.get_node_ip_address(), nemo_rl.__file__
    def leave(self):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        os.kill(os.getpid(), 9)  # as when memory is short: what it started stays

workers = [Worker.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in ray.nodes()]
places = dict(zip(ray.get([worker.where.remote() for worker in workers]), workers))
for place in sorted(places):
    print("on", *place, flush=True)
ray.wait([places[max(places)].leave.remote()])
"""


@pytest.mark.full
def test_a_small_tree_on_two_nodes() -> None:
    """Environments are the image's, and the tree is ours, in a folder that all nodes share."""
    write_runnable_tree(SHARED / "alice/tree", SCRIPT)
    places = {"NEMO_RL_DIR": "/srv/alice/tree", "NEMO_RL_VENV": "/opt/trainer_venv"}
    job = submit('functional run --driver nemo-rl recipe.yaml --out "$FUNCTIONAL_OUT/run"', settings=places)
    assert job.wait(300) == ("FAILED", "1:0"), job.log
    log = (job.logs / "results/run/logs/run_grpo.log").read_text()
    init = "/srv/alice/tree/nemo_rl/__init__.py"
    assert [line for line in log.splitlines() if line.startswith("on ")] == [f"on 10.0.0.{n} {init}" for n in (1, 2)]
    passed, found = teardown(job)
    assert not passed
    assert re.fullmatch(r"after the script's end, on 10\.0\.0\.2: process \d+: sleep 600", found)


IMPORTS = """
python - <<'PYTHON'
import json, os, pathlib, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(log_to_driver=False)

@ray.remote(num_cpus=0)
def place():
    import sys, nemo_rl
    return {"node": os.environ["SLURMD_NODENAME"], "nemo_rl": nemo_rl.__file__, "environment": sys.prefix}

placed = [place.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in ray.nodes()]
found = sorted(ray.get(placed), key=lambda one: one["node"])
pathlib.Path(os.environ["FUNCTIONAL_OUT"], "found.json").write_text(json.dumps(found))
PYTHON
"""
UNMODIFIED = """
printf '{"input": "%s+1=", "output": "%s"}\\n' 1 2 2 3 3 4 4 5 5 6 6 7 7 8 8 9 >/tmp/train.jsonl
model=$(/opt/trainer_venv/bin/python -c 'from functional.suite.models import ARITHMETIC_DIR; print(ARITHMETIC_DIR)')
functional run --driver nemo-rl examples/configs/grpo_math_1B_dynamo.yaml --out "$FUNCTIONAL_OUT/run" \\
  --deadline-s 2400 policy.model_name="$model" policy.tokenizer.name="$model" env.math.num_workers=1 \\
  data.train.dataset_name=ResponseDataset +data.train.data_path=/tmp/train.jsonl data.train.split_validation_size=0 \\
  policy.generation.vllm_cfg.gpu_memory_utilization=0.1"""  # of the machine's memory, on CPU


@pytest.mark.full
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_unmodified_script_without_a_gpu(nodes: int) -> None:
    """NeMo RL itself, in an image that was built with it (NAME names it), up to its trainer's first NCCL call."""
    name = os.environ.get("NAME") or "cpu"
    if "nemo_rl" not in json.loads((REPO / "dist" / name / "record.json").read_text())["image"]:
        pytest.skip(f"the image '{name}' was built without NeMo RL: NEMO_RL=TREE NAME=nemo-cpu make image sqsh")
    apart = "" if nodes == 1 else " cluster.num_nodes=2 cluster.gpus_per_node=1"
    job = submit(f"{IMPORTS}{UNMODIFIED}{apart}", "--time=90", nodes=nodes, gpus=2 if nodes == 1 else 1)
    assert job.wait(3600) == ("FAILED", "1:0"), job.log
    assert json.loads((job.logs / "results/found.json").read_text()) == [
        {"node": f"node{n + 1}", "nemo_rl": "/opt/nemo-rl/nemo_rl/__init__.py", "environment": "/opt/nemo_rl_venv"}
        for n in range(nodes)
    ]
    report = read_report(job)
    assert "ProcessGroupNCCL is only supported with GPUs" in report["error"], report["error"]
    assert {"recipe", "cluster", "etcd", "nats", "frontend"} <= report["phases"].keys()
    assert teardown(job) == (True, "no process, port or folder of the run is left")


def read_report(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.logs / "results/run/report.json").read_text())
    return found


def teardown(job: Job) -> tuple[bool, str]:
    (check,) = (one for one in read_report(job)["checks"] if one["name"] == "teardown.nothing_left")
    return check["passed"], check["detail"]

"""Commands of the documentation for the image that cost little, typed as they stand, and what it says they print."""

import os
import subprocess
from pathlib import Path

import pytest

FUNCTIONAL = Path(__file__).parents[2] / "functional"
"""As /opt/functional: `recipes/` is in it."""
SHOWN = {
    "functional config recipes/grpo_cpu.yaml policy.optimizer.lr=0.1": ("lr: 0.1",),
    "functional config recipes/grpo_cpu.yaml cluster.num_nodes=2": (
        "node 0           trainer on device 0, engine 0 on device 1",
        "node 1           engine 1 on device 0",
    ),
    "functional config recipes/grpo_cpu.yaml policy.generation.vllm_cfg.tensor_parallel_size=2"
    " policy.generation.colocated.resources.gpus_per_node=4 cluster.gpus_per_node=5": (
        "node 0           trainer on device 0, engine 0 on devices 1–2, engine 1 on devices 3–4",
        "engine           tensor 2; a node may have 4 of one device, 2 of pipeline 2, 2 of tensor 2, …",
    ),
    "functional config recipes/grpo_cpu.yaml policy.generation.vllm_cfg.tensor_parallel_size=2"
    " policy.generation.colocated.resources.gpus_per_node=2 cluster.gpus_per_node=4": (
        "node 0           trainer on devices 0–1, engine 0 on devices 2–3",
    ),
}


@pytest.mark.parametrize("command", SHOWN)
def test_a_recipe_is_shown(command):
    environment = os.environ | {"PYTHONPATH": str(FUNCTIONAL.parent)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=FUNCTIONAL, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = {" ".join(line.split()) for line in done.stdout.splitlines()}
    for line in SHOWN[command]:
        words = " ".join(line.split()).partition("…")[0].strip()
        assert any(one.startswith(words) for one in lines), done.stdout

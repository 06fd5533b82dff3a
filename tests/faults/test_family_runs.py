"""Two GRPO steps of each family that can be proved, on real engines, in layouts of one and several ranks."""

import json
import subprocess
import sys

import pytest

from functional.suite.shapes import MADE, SHAPES
from tests.packing import cpu_packs
from tests.recipes import RECIPES

RECIPE = RECIPES / "grpo_cpu.yaml"
GENERATION = "policy.generation"
LEARNING = (
    "data.dataset_name=token_set",
    f"{GENERATION}.max_new_tokens=16",
    "policy.optimizer.lr=0.5",
)
TWO = (f"{GENERATION}.colocated.resources.gpus_per_node=2", "cluster.gpus_per_node=3")
LAYOUTS = {
    "one": (),
    "tensor": (f"{GENERATION}.vllm_cfg.tensor_parallel_size=2", *TWO),
    "pipeline": (f"{GENERATION}.vllm_cfg.pipeline_parallel_size=2", *TWO),
    "plan": (
        f"{GENERATION}.vllm_cfg.tensor_parallel_size=2",
        f"{GENERATION}.vllm_cfg.env_vars.VLLM_CPU_RESIDENT_WEIGHTS='1'",
        *TWO,
    ),
}
OWN = {"builtin:random-gemma3": (f"{GENERATION}.dynamo_cfg.frontend_args.router_mode=round-robin",)}
"""Dynamo 1.3.0.post1's router applies no cache event of an engine with sliding-window attention."""
SMALL = sorted(name for name, shape in MADE.items() if shape.endswith("-small"))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", SMALL)
def test_two_steps_are_proved(model, layout, tmp_path):
    out = tmp_path / "out"
    overrides = [f"policy.model_name={model}", *LEARNING, *LAYOUTS[layout], *OWN.get(model, ())]
    command = [sys.executable, "-m", "functional.suite.cli", "run", str(RECIPE), *overrides, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((out / "report.json").read_text())
    ranks = 1 if layout == "one" else 2
    for refit in report["refits"]:
        assert len(refit["proved_bytes"]) == ranks
        packed = "moe" in model or (layout != "plan" and cpu_packs())  # experts are packed all the same
        assert refit["by_plan"] != packed, refit["no_plan"]
        assert sum(refit["proved_bytes"]) >= refit["bytes_sent"], "padding, and what both ranks hold, come on top"
    padded = SHAPES[MADE[model]].vocab_size % 64
    assert padded, "no padding was proved"

"""Whole runs of the trainer: a foreign recipe, filters of sampling, and a run that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from functional.suite.checkpoint import TrainingInfo
from tests.recipes import RECIPES

pytestmark = [pytest.mark.faults, pytest.mark.full]
CPU = RECIPES / "grpo_cpu.yaml"
FOREIGN = Path(__file__).parents[1] / "runtime" / "foreign.yaml"
RANDOM = ["policy.model_name=builtin:random-qwen3", "data.dataset_name=token_set"]
"""Of 134 tokens, nearly alike: top-k 50 cuts more than half of the mass."""
DEADLINE_S = 300


def command(recipe, out, *overrides):
    return [sys.executable, "-m", "functional.suite.cli", "run", str(recipe), *overrides, "--out", str(out)]


def run(recipe, out, *overrides):
    """Exit status and report."""
    done = subprocess.run(command(recipe, out, *overrides), capture_output=True, text=True, timeout=DEADLINE_S)
    assert (out / "report.json").exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, json.loads((out / "report.json").read_text())


def failed(report):
    return [check["name"] for check in report["checks"] if not check["passed"]]


def test_a_foreign_recipe_as_it_stands(tmp_path):
    filters = ["policy.generation.top_p=0.95", "policy.generation.top_k=50", "policy.generation.temperature=0.7"]
    status, report = run(FOREIGN, tmp_path, *RANDOM, *filters)
    assert (status, failed(report)) == (0, [])
    assert [step["step"] for step in report["steps"]] == [1, 2]


def test_a_trainer_that_ignores_top_k_fails_where_one_that_follows_passes(tmp_path):
    cut = [*RANDOM, "policy.generation.top_k=50", "grpo.max_num_steps=1"]
    status, report = run(CPU, tmp_path / "follows", *cut)
    assert (status, failed(report)) == (0, [])
    status, report = run(CPU, tmp_path / "ignores", *cut, "faults.score_unfiltered=true")
    assert status == 1
    assert {"step1.token_mult_prob_error", "step1.logprobs_agree"} <= {*failed(report)}


def test_a_run_that_is_killed_goes_on_from_the_last_whole_checkpoint(tmp_path):
    overrides = ["checkpointing.enabled=true", "checkpointing.save_period=1", "grpo.val_period=2"]
    overrides += ["data.split_validation_size=0.2"]
    first = subprocess.Popen(
        command(CPU, tmp_path, *overrides, "grpo.max_num_steps=10000"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline, kept = time.monotonic() + DEADLINE_S, tmp_path / "checkpoints"
    while not (kept / "step_3").exists():
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (driver,) = json.loads((tmp_path / "processes.json").read_text())["driver"]
    os.kill(driver, signal.SIGKILL)
    first.wait(60)
    done = max(int(path.name.removeprefix("step_")) for path in kept.glob("step_*"))
    assert TrainingInfo.of(kept / f"step_{done}").step == done
    status, report = run(CPU, tmp_path, *overrides, f"grpo.max_num_steps={done + 2}")
    assert (status, failed(report)) == (0, [])
    assert report["resumed_from"] == done
    assert [step["step"] for step in report["steps"]] == [done + 1, done + 2]
    assert sorted(path.name for path in kept.iterdir() if path.name.startswith(".")) == []

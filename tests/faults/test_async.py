"""Whole runs that generate while they train, in which nothing is killed: that is in test_faults."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from functional.runtime.rollout.records import read_records
from tests.recipes import RECIPES

pytestmark = pytest.mark.faults
DEADLINE_S = 400
AHEAD = ["grpo.async_grpo.enabled=true", "grpo.max_num_steps=4"]
LONG = [
    "policy.model_name=builtin:random-qwen3",
    "data.dataset_name=token_set",
    "policy.optimizer.lr=0.5",
    "policy.generation.max_new_tokens=64",
    "policy.generation.vllm_kwargs.max_num_seqs=8",
]
"""Answers that no stop token ends, few at a time, so that a batch is under way for longer than a step takes."""


def run(out, *overrides):
    """Exit status and report."""
    command = [sys.executable, "-m", "functional.suite.cli", "run", str(RECIPES / "grpo_cpu.yaml"), *AHEAD, *overrides]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (out / "report.json").exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, json.loads((out / "report.json").read_text())


def failed(report):
    return [check["name"] for check in report["checks"] if not check["passed"]]


def test_rollouts_and_training_at_once(tmp_path):
    status, report = run(tmp_path)
    assert (status, failed(report)) == (0, [])
    assert {"async.age_bounded", "async.overlap", "async.no_update_in_flight"} <= {c["name"] for c in report["checks"]}
    assert report["asynchronous"]["ages"] == {"0": 64, "1": 192}
    ages = Counter(
        record["step"] - 1 - record["policy_version"] for record in read_records(tmp_path / "rollouts.jsonl")
    )
    assert ages == {0: 64, 1: 192}


@pytest.mark.full
def test_updates_that_do_not_wait_for_rollouts(tmp_path):
    status, report = run(tmp_path, *LONG, "grpo.async_grpo.in_flight_weight_updates=true")
    assert (status, failed(report)) == (0, [])
    found = report["asynchronous"]
    assert found["spanning"] > 0
    records = read_records(tmp_path / "rollouts.jsonl")
    assert sum(record["policy_version"] < record["last_version"] for record in records) == found["spanning"]
    assert max(record["step"] - 1 - record["policy_version"] for record in records) == 1

"""Three seeds of a longer recipe: the reward rises, and does not where updates never reach the engines."""

import json
import os
from pathlib import Path

import pytest

from functional.suite.learning import SEEDS, main
from tests.recipes import RECIPES

pytestmark = [pytest.mark.faults, pytest.mark.full]


def failed(out):
    report = json.loads((out / "report.json").read_text())
    return {check["name"].partition(".")[2] for check in report["checks"] if not check["passed"]}


def test_rewards_rise_with_updates_and_not_without(tmp_path):
    """LEARNING_OUT keeps the plot."""
    out = Path(os.environ.get("LEARNING_OUT", tmp_path))
    assert main(RECIPES / "learning_cpu.yaml", out, []) == 0, (out / "learning.json").read_text()
    assert (out / "learning.svg").stat().st_size > 1000
    for seed in SEEDS:
        assert failed(out / f"trained-{seed}") == set()
        assert failed(out / f"withheld-{seed}") >= {"token_mult_prob_error", "logprobs_agree"}

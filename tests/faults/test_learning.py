"""Three seeds of a longer recipe: the reward rises, and does not where updates never reach the engines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes import RECIPES

pytestmark = [pytest.mark.faults, pytest.mark.full]
DEADLINE_S = 1500


def test_rewards_rise_with_updates_and_not_without(tmp_path):
    """LEARNING_OUT keeps the plot."""
    out = Path(os.environ.get("LEARNING_OUT", tmp_path))
    command = [sys.executable, "-m", "functional.suite.cli", "learning", str(RECIPES / "learning_cpu.yaml")]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((out / "learning.json").read_text())
    assert found["learns"]
    assert found["stays"]
    assert found["trained"]["low"] > 0
    assert max(map(abs, (found["withheld"]["low"], found["withheld"]["high"]))) <= 0.2 * found["trained"]["mean"]
    passed = {c["name"] for c in json.loads((out / "report.json").read_text())["checks"] if c["passed"]}
    assert {"withheld42.noticed", "withheld43.noticed", "withheld44.noticed"} <= passed
    assert (out / "learning.svg").stat().st_size > 1000

"""Updates under faults, on one fleet of two real workers: `functional refit-faults`."""

import json
import re
import subprocess
import sys

import pytest

from functional.runtime.recipe.seeds import engine_seed
from functional.suite.doctor.examine import examine
from functional.suite.doctor.folder import RunFolder
from tests.packing import cpu_packs
from tests.recipes import RECIPES

RECIPE = RECIPES / "grpo_cpu.yaml"
EXPECTED = {
    "failing-n-times.back",
    "failing-n-times.next",
    "lying-send-swap",
    "lying-send-flip",
    "lying-send-skip",
    "lying-send-twice",
    "old-weights-proved",
    "clear-refused",
    "clear-ignored",
    "clear-ignored.fleet_sound",
    "worker-killed-generating",
    "worker-killed-mid-transfer",
    "worker-stopped-mid-transfer",
    "all-workers-killed",
    "trainer-killed-mid-transfer",
}

DIAGNOSED = {
    "send-failed",
    "weights-not-proved",
    "old-weights-served",
    "clear-refused",
    "cache-not-cleared",
    "worker-lost",
    "transfer-deadline",
    "sender-lost",
    "update-given-up",
}
"""What the doctor must name, each from its own fault in the one run."""


WAYS = {
    "checkpoint": (),
    "keyed": ("policy.generation.dynamo_cfg.proof=nh",),
    "plan": ("policy.generation.vllm_cfg.env_vars.VLLM_CPU_RESIDENT_WEIGHTS='1'",),
}


@pytest.mark.faults
@pytest.mark.parametrize(
    "way", ["checkpoint", *(pytest.param(way, marks=pytest.mark.full) for way in ("keyed", "plan"))]
)
def test_each_fault_comes_to_its_end_and_nothing_is_left(way, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "functional.suite.cli", "refit-faults", str(RECIPE), *WAYS[way], "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((out / "report.json").read_text())
    passed = {check["name"] for check in report["checks"] if check["passed"]}
    assert {f"fault.{name}" for name in EXPECTED} <= passed
    assert sum(name.startswith("fault.failing-send-") for name in passed) == 4
    assert "teardown.nothing_left" in passed
    assert {one.cause for one in examine(RunFolder.open(out))} >= DIAGNOSED
    assert {refit["by_plan"] for refit in report["refits"]} == {way == "plan" or not cpu_packs()}
    shut = [t for t in report["refit_transitions"] if t["after"] != "serving"]
    assert not any(t["admission"] for t in shut)
    launched = {int(slot): seeds for slot, seeds in report["topology"]["seeds"].items()}
    assert sum(len(seeds) for seeds in launched.values()) >= 2 + 5, "five workers and more were replaced"
    for slot, seeds in launched.items():
        assert seeds == [engine_seed(42, slot, launch) for launch in range(len(seeds))]
        logged = re.findall(r"\bseed=(\d+)", (out / "logs" / f"worker-{slot}.log").read_text(errors="replace"))
        assert list(dict.fromkeys(map(int, logged))) == seeds, "an engine has another seed than it was given"

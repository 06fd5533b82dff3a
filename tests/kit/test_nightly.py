"""A whole night on CPU, from the image to the published report, with what this working tree holds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.kit.conftest import REPO

pytestmark = [pytest.mark.road, pytest.mark.full]


@pytest.mark.skipif(os.geteuid() != 0, reason="the engine and the runner need root")
def test_a_night_on_cpu_from_start_to_end(tmp_path: Path) -> None:
    publish = tmp_path / "nightly"
    secret = "not-for-the-log-4711"
    environment = {**os.environ, "PUBLISH": str(publish), "NIGHT_TOKEN": secret, "SLURM": "local", "KEEP": "1"}
    command = ["bash", "ci/nightly.sh", "--profile", "cpu", "grpo.seed=7"]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (night,) = publish.glob("20*")
    names = {path.name for path in night.iterdir()}
    assert {
        "record.json",
        "report.json",
        "report.html",
        "report.md",
        "junit.xml",
        "release.html",
        "timings.json",
    } <= names
    closed = json.loads((night / "timings.json").read_text())
    assert closed["regressed"] == []
    stages = {name.removeprefix("stage: ") for name in closed["night"]["seconds"] if name.startswith("stage: ")}
    assert stages == {"image", "push", "sqsh", "functional", "slurm", "matrices", "verify"}
    assert closed["left_out"] == []
    assert closed["night"]["about"]["name"] == "cpu"
    assert len((publish / "history.jsonl").read_text().splitlines()) == 1
    assert secret not in (night / "nightly.log").read_text()
    runs = sorted((night / "matrix").iterdir(), key=lambda folder: int(folder.name))
    assert len(runs) == sum(
        line[:1] not in ("#", "") for line in (REPO / "ci/nightly-cpu.txt").read_text().splitlines()
    )
    for run in runs:
        assert json.loads((run / "report.json").read_text())["status"] == "passed", run / "settings"
        assert (run / "report.html").exists()
    recovery = (runs[0] / "report.md").read_text()
    assert "| Failure recovery | proved |" in recovery
    record = json.loads((night / "record.json").read_text())
    assert record["functional"]["job"]["nodes"] == "node1", "the recorded run is the job's"
    assert record["functional"]["job"]["id"] in (night / "release.html").read_text()

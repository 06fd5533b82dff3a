"""Both reports in a real browser, in every form, with an accessibility audit; CI files linted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kit.nights import Night, keep_night
from tests.kit.conftest import REPO, Kit

pytestmark = [pytest.mark.image, pytest.mark.full]
SUITE = REPO / "dist/cpu/functional"
SAMPLES = "cd /src && PYTHONPATH=/src python -m tests.suite.sample_pages /out && functional report /out/real"


@pytest.fixture(scope="module")
def tools() -> Path:
    """Folder of the programs in lockfiles/pages.txt."""
    done = subprocess.run([REPO / "ci/pages-env.sh", "--yes"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return (REPO / done.stdout.strip()).parent


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's own run and runs that are hard to show, rendered in the image by this working tree."""
    out = tmp_path_factory.mktemp("pages")
    subprocess.run(["cp", "-r", SUITE, out / "real"], check=True)
    mounts = [f"{REPO}/{name}:/src/{name}:ro" for name in ("functional", "tests")] + [f"{out}:/out"]
    words = [word for mount in mounts for word in ("--mount", mount)]
    command: list[str | Path] = [REPO / ".venv/bin/python", REPO / "build.py", "run", *words, "--network", "none", "--"]
    done = subprocess.run([*command, "bash", "-c", SAMPLES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.skipif(not (SUITE / "report.json").exists(), reason="no run of the suite here: make functional")
def test_reports_in_a_browser(tools: Path, pages: Path, kit: Kit, tmp_path: Path) -> None:
    kit.release("tiny", [[]])
    for index in range(12):
        about = {"name": "tiny", "profile": "cpu"}
        seconds = {"stage: sqsh": 14.0 + index % 3, "suite: fleet": 33.0}
        one = Night(time=f"2026-01-{index + 1:02}", commit="a" * 40, about=about, status="passed", seconds=seconds)
        keep_night(kit.root / "dist/nightly/history.jsonl", one)
    assert kit("report", "tiny").returncode == 0
    shown = [pages / name / "report.html" for name in ("real", "early", "long")] + [kit.root / "dist/tiny/report.html"]
    out = Path(os.environ.get("SCREENSHOTS", tmp_path / "screenshots"))
    command = [tools / "python", REPO / "tests/kit/look_at_pages.py", out, *shown]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(answers) == 3 * len(shown)
    for answer in answers:
        assert answer["violations"] == [], answer
        assert answer["rules_passed"] > 20
        assert answer["said"] == [], "the page's own console"
        assert answer["other_requests"] == [], "one self-contained file"
        assert answer["overflow"] <= 0, "nothing sticks out sideways"
        assert answer["smallest_label"] is None or answer["smallest_label"] >= 9
        assert (answer["background"] == "rgb(255, 255, 255)") == (answer["view"] != "dark")
    assert all(answer["pdf_bytes"] > 10_000 for answer in answers if "pdf_bytes" in answer)
    assert len(list(out.glob("*.png"))) == len(answers)


def test_ci_files_are_sound(tools: Path) -> None:
    workflows = [str(path) for path in (REPO / ".github/workflows").glob("*.yml")]
    check = str(tools / "check-jsonschema")
    commands = [
        [str(tools / "actionlint"), *workflows],
        [check, "--builtin-schema", "vendor.github-workflows", *workflows],
        [check, "--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci", str(REPO / ".gitlab-ci.yml")],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPO)
        assert done.returncode == 0, done.stdout + done.stderr

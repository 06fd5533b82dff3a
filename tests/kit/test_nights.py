"""Timings of nights: a regression is told from noise, and a night that failed is kept and not judged."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from kit.errors import KitError
from kit.night import close_night
from kit.nights import FEWEST, Night, keep_night, read_nights, regressions, suite_seconds, t_quantile, upper_bound
from kit.record import FunctionalSection, JobFacts, add_section, read_record
from tests.kit.conftest import REPO, Kit
from tests.kit.tiny_image import Entry, folder

ABOUT = {"name": "tiny", "profile": "cpu"}


def night(seconds: dict[str, float], status: str = "passed", **about: str) -> Night:
    return Night(time="2026-01-01", commit="a" * 40, about={**ABOUT, **about}, status=status, seconds=seconds)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [(0.95, 1, 6.314), (0.999, 5, 5.893), (0.999, 29, 3.396), (0.975, 10, 2.228), (0.9999, 8, 6.442)],
)
def test_quantiles_are_those_of_the_tables(probability: float, degrees: int, value: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(value, rel=1e-3)


@pytest.mark.unit
@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_false_alarms_are_as_rare_as_said_and_regressions_are_seen(spread: float) -> None:
    """Simulated nights of ten times each: no change, and one time that takes much longer than its noise."""
    draw = random.Random(7)
    names = [f"t{index}" for index in range(10)]

    def one() -> dict[str, float]:
        return {name: 30 * draw.lognormvariate(0, spread) for name in names}

    alarms, seen, rounds = 0, 0, 60
    for _ in range(rounds):
        earlier = [night(one()) for _ in range(20)]
        alarms += bool(regressions(night(one()), earlier))
        slow = one()
        slow["t3"] *= math.exp(8 * spread)
        seen += [found.name for found in regressions(night(slow), earlier)] == ["t3"]
    assert alarms <= 3  # expected: 0.6
    assert seen > 0.85 * rounds


@pytest.mark.unit
def test_only_nights_alike_count() -> None:
    usual = [night({"a": 10.0 + index % 3}) for index in range(FEWEST)]
    slow = night({"a": 30.0, "new": 99.0})
    assert [found.name for found in regressions(slow, usual)] == ["a"]
    assert "usually 11.00 s" in str(regressions(slow, usual)[0])
    assert regressions(slow, usual[1:]) == [], "too few nights to tell"
    assert regressions(slow, [night({"a": 10.0}, processor="another") for _ in usual]) == []
    assert regressions(slow, [night({"a": 10.0}, "failed") for _ in usual]) == []
    quick = [night({"a": 0.01 + 0.001 * (index % 3)}) for index in range(FEWEST)]
    assert regressions(night({"a": 0.4}), quick) == [], "too short to matter"


@pytest.mark.unit
def test_equal_times_still_leave_room_for_the_clock() -> None:
    assert upper_bound([10.0] * 10, 0.001) > 10.2
    assert upper_bound([10.0] * 10, 0.001) < 12


@pytest.mark.unit
def test_the_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    history = tmp_path / "nightly/history.jsonl"
    assert read_nights(history) == []
    nights = [night({"a": 1.0}), night({"a": 2.0}, "failed")]
    for one in nights:
        keep_night(history, one)
    assert read_nights(history) == nights
    history.write_text(history.read_text() + "{}\n")
    with pytest.raises(KitError, match=r"history\.jsonl:3 is no night"):
        read_nights(history)


@pytest.mark.unit
def test_what_a_suite_tells_of_its_times() -> None:
    refits = [{"total_s": value} for value in (9.0, 1.0, 3.0)]
    found = suite_seconds({"phases": {"fleet": 30.0}, "seconds": 70, "refits": refits})
    assert found == {"suite: fleet": 30.0, "suite: total": 70.0, "suite: policy update": statistics.median([1.0, 3.0])}
    assert suite_seconds({}) == {}


@pytest.mark.unit
def test_a_night_is_closed(tmp_path: Path) -> None:
    place, history = tmp_path / "night", tmp_path / "history.jsonl"
    place.mkdir()
    with pytest.raises(KitError, match="holds no stages of a night"):
        close_night("no-such-release", place, history, failed=False)
    for took in (10.0, 11.0, 10.5, 10.2, 10.8, 10.4, 40.0, 40.0):
        (place / "stages.tsv").write_text(f"sqsh\t{took}\t0\nslurm\t0.1\t3\n")
        closed = close_night("no-such-release", place, history, failed=False)
        assert closed.left_out == ["slurm"]
        assert "stage: slurm" not in closed.night.seconds
        assert bool(closed.regressed) == (took == 40.0), "a regressed night is no measure for the next"
    assert [one.status for one in read_nights(history)][-2:] == ["regressed", "regressed"]
    assert close_night("no-such-release", place, history, failed=True).regressed == []
    assert json.loads((place / "timings.json").read_text())["night"]["status"] == "failed"


@pytest.mark.unit
def test_secrets_do_not_come_through(tmp_path: Path) -> None:
    secrets = {"REGISTRY_TOKEN": "abc-123-def", "API_KEY": "first line\nsecond-line", "PASSWORD": "x"}
    said = "login abc-123-def\nsecond-line, first line\nx-ray\n"
    command = [sys.executable, str(REPO / "ci/hide_secrets.py")]
    done = subprocess.run(command, input=said, capture_output=True, text=True, env=secrets, timeout=20)
    assert done.stdout == "login ***\n***, ***\nx-ray\n"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stages", "image,fly"], "error: there is no stage 'fly': choose of image push"),
        (["--fast"], "error: unknown option '--fast'"),
    ],
)
def test_a_night_that_is_asked_for_wrongly(words: list[str], said: str) -> None:
    done = subprocess.run(["bash", REPO / "ci/nightly.sh", *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert done.stderr.startswith(said)


def test_a_night_goes_to_its_first_failure_and_is_published(kit: Kit) -> None:
    """A release of a tiny image, and a stage that fails: verify, since its oci/ is damaged."""
    build = [folder("opt"), folder("opt/release"), Entry("opt/release/build.json", b'{"inputs": {"base": "1"}}')]
    digest = kit.release("tiny", [build], None, {"base": "1"})
    (kit.root / "ci").mkdir()
    for name in ("nightly.sh", "hide_secrets.py"):
        (kit.root / "ci" / name).write_bytes((REPO / "ci" / name).read_bytes())
    command = ["bash", "ci/nightly.sh", "--name", "tiny", "--stages", "slurm,verify"]
    environment = {**kit.env, "PYTHON": sys.executable, "SLURM": "never", "NIGHT_TOKEN": digest}
    first = subprocess.run(command, cwd=kit.root, env=environment, capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stdout + first.stderr
    (published,) = (kit.root / "dist/nightly").glob("20*")
    assert {"record.json", "release.html", "release.txt", "timings.json", "nightly.log"} <= {
        p.name for p in published.iterdir()
    }
    assert json.loads((published / "timings.json").read_text())["left_out"] == ["slurm"]
    assert digest not in (published / "nightly.log").read_text()

    (kit.root / "dist/tiny/oci/index.json").unlink()
    again = subprocess.run(command, cwd=kit.root, env=environment, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1
    assert "error: the night failed in 'verify'" in again.stdout
    assert [one.status for one in read_nights(kit.root / "dist/nightly/history.jsonl")] == ["passed", "failed"]


STAND_IN = """
import json, pathlib, sys
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
for file in out.iterdir():
    file.unlink()  # as a fault case does
(out / "words").write_text(" ".join(words))
report = {"seconds": 9.0, "hardware": {"processor": "x", "cores": 2, "gpus": []}}
(out / "report.json").write_text(json.dumps(report))
sys.exit("grpo.seed=13" in words)
"""
"""Takes the place of the suite: the nightly's own GPU stage runs it (docs/nightly.md)."""


def test_a_night_in_plain_environments(kit: Kit) -> None:
    (kit.root / "ci").mkdir()
    for name in ("nightly.sh", "hide_secrets.py"):
        (kit.root / "ci" / name).write_bytes((REPO / "ci" / name).read_bytes())
    suite = kit.root / "functional/suite"
    suite.mkdir(parents=True)
    (suite / "cli.py").write_text(STAND_IN)
    (kit.root / "ci/nightly-cuda.txt").write_text("# the longer ones\nfault f r.yaml\nrun r.yaml a.b=c\n")
    environment = {**kit.env, "PYTHON": sys.executable}

    def plain(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "ci/nightly.sh", "--plain", "--profile", "cuda", *words]
        return subprocess.run(command, cwd=kit.root, env=environment, capture_output=True, text=True, timeout=120)

    first = plain("cluster.share_gpu=true")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Error" not in first.stdout
    (published,) = (kit.root / "dist/nightly").glob("20*-plain-cuda")
    said = (published / "functional/words").read_text()
    assert said == f"run recipes/grpo_gpu.yaml cluster.share_gpu=true --out {published}/functional"
    assert (published / "matrix/1/words").read_text() == f"fault f r.yaml --out {published}/matrix/1"
    assert (published / "matrix/1/settings").read_text() == "fault f r.yaml\n"
    closed = json.loads((published / "timings.json").read_text())
    assert closed["night"]["seconds"]["suite: total"] == 9.0
    assert {"stage: functional", "stage: matrices"} < closed["night"]["seconds"].keys()
    assert json.loads((published / "report.json").read_text())["seconds"] == 9.0

    assert plain("recipes/other.yaml", "grpo.seed=13").returncode == 1
    assert plain("--stages", "image").returncode == 2
    environment["PYTHON"] = ""
    assert plain().returncode == 2
    assert [one.status for one in read_nights(kit.root / "dist/nightly/history.jsonl")] == ["passed", "failed"]


def test_a_release_is_reported(kit: Kit) -> None:
    digest = kit.release("tiny", [[]])
    history = kit.root / "history.jsonl"
    for index in range(3):
        keep_night(history, night({"stage: <sqsh>": 10.0 + index}))
    keep_night(history, night({"stage: other": 1.0}, name="another"))
    done = kit("report", "tiny", "--history", history, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(link["name"], link["holds"]) for link in found["chain"]] == [
        ("commit", "missing"), ("image", "yes"), ("push", "missing"), ("squashfs", "missing"), ("run", "missing"),
    ]  # fmt: skip
    assert found["layers"][0]["size"] > 0
    assert len(found["nights"]) == 3
    page = (kit.root / "dist/tiny/report.html").read_text()
    assert digest in page
    assert "stage: &lt;sqsh&gt;" in page
    assert "<sqsh>" not in page
    assert "script" not in page
    shown = kit("report", "tiny", "--history", history)
    assert "night 2026-01-01 aaaaaaaaaaaa: passed" in shown.stdout
    missing = kit("report", "none")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)


def test_a_suite_that_ran_as_a_job_is_reported_so(kit: Kit) -> None:
    kit.release("tiny", [[]])
    path = kit.root / "dist/tiny/record.json"
    digest = read_record(path).image.digest
    job = JobFacts(id="7", nodes="node[1-2]", backend="runner", seconds={"queued": 0.0, "command": 11.6})
    suite = FunctionalSection(
        path="functional/report.json", sha256="1" * 64, status="passed", image_digest=digest, sqsh_sha256="2" * 64,
        passed=35, failed=0, skipped=0, job=job,
    )  # fmt: skip
    add_section(path, suite)
    shown = kit("report", "tiny")
    assert shown.returncode == 0, shown.stderr
    assert (
        "run: passed, 35 passed, 0 failed (the squashfs it ran in, as Slurm job 7 on node[1-2] by runner)"
        in shown.stdout
    )
    assert "job until: command: 11.6 s" in shown.stdout
    assert "job 7 on node[1-2] by runner" in (kit.root / "dist/tiny/report.html").read_text()

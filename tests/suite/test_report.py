"""Report and JUnit XML agree with the checks, a failed or absent check never reads as passed, and the report is as its
published schema says."""

import json
import math
from xml.etree import ElementTree

import pytest

from functional.runtime.errors import ConfigError
from functional.suite.checklist import Checklist
from functional.suite.data import DataRecord
from functional.suite.report import SCHEMA_FILE, LostSample, Report, Step, json_schema, read_release, write_report

ALWAYS = {
    "schema_version", "status", "error", "release", "checks", "phases", "refits", "refit_transitions", "steps",
    "lost_samples", "recipe", "versions", "data", "options", "warnings", "seconds",
}  # fmt: skip


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Of a run outside an image that has come no further than its inputs."""
    monkeypatch.setenv("RELEASE_DIR", str(tmp_path / "release"))
    data = DataRecord("arithmetic", "built in", 155, "0" * 64)
    return Report.begin(read_release(), recipe={}, versions={}, data=data, options=[], warnings=[])


def outcome(tmp_path, report, checks, error=None):
    report.finish(checks, error, 1.5)
    write_report(tmp_path, report)
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    return json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail), suite


def test_all_passed(tmp_path, report):
    checks = Checklist()
    checks.add("a", True, "fine", value=1)
    written, suite = outcome(tmp_path, report, checks)
    assert written["status"] == "passed"
    assert written["checks"][0] == {"name": "a", "passed": True, "detail": "fine", "figures": {"value": 1}}
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "0")
    assert [case.get("name") for case in suite.iter("testcase")] == ["a"]


@pytest.mark.parametrize("error", [None, "worker 0 was killed\nmore"])
def test_one_failed(tmp_path, report, error):
    checks = Checklist()
    checks.add("a", True, "fine")
    checks.add("b", False, "no <good> \x1b[31m")
    written, suite = outcome(tmp_path, report, checks, error)
    assert written["status"] == "failed"
    assert written["error"] == error
    failure = suite.find("./testcase[@name='b']/failure")
    assert failure is not None
    assert "no <good>" in failure.get("message", "")
    assert suite.get("errors") == ("1" if error else "0")
    names = ["run", "a", "b"] if error else ["a", "b"]
    assert [case.get("name") for case in suite.iter("testcase")] == names
    assert suite.get("tests") == str(len(names))


def test_no_checks_at_all_is_a_failure(tmp_path, report):
    written, _ = outcome(tmp_path, report, Checklist())
    assert written["status"] == "failed"
    assert not Checklist().passed


def test_what_a_run_did_not_come_to_is_left_out(tmp_path, report):
    written, _ = outcome(tmp_path, report, Checklist(), "no Ray")
    assert written.keys() == ALWAYS
    assert written["release"] == {}
    assert written["data"]["longest_prompt"] is None


def test_numbers_that_are_not_finite_are_null(tmp_path, report):
    checks = Checklist()
    checks.add("a", True, "fine", bad=math.nan, good=1.0, nested=[{"worse": -math.inf}])
    report.steps.append(Step(step=1, samples=0, truncated=0, mean_reward=math.nan, grad_norm=math.inf, loss=0.5))
    written, _ = outcome(tmp_path, report, checks)
    assert written["checks"][0]["figures"] == {"bad": None, "good": 1.0, "nested": [{"worse": None}]}
    step = {"step": 1, "samples": 0, "truncated": 0, "mean_reward": None, "grad_norm": None, "loss": 0.5}
    assert written["steps"] == [step]
    assert Report.model_validate(written).steps[0].mean_reward is None


def test_what_is_written_is_read_back(tmp_path, report):
    checks = Checklist()
    checks.add("a", False, "not fine", worker=0)
    report.lost_samples.append(LostSample(step=1, rollout=2, reason="gone"))
    report.fleet_phases = {"control plane": 0.5}
    outcome(tmp_path, report, checks, "ended")
    again = Report.model_validate_json((tmp_path / "report.json").read_text())
    assert again.as_json() == report.as_json()
    assert again.lost_samples == report.lost_samples


def test_the_published_schema_is_that_of_the_models():
    assert SCHEMA_FILE.read_text(encoding="utf-8") == json_schema(), (
        f"{SCHEMA_FILE.name} is not what the models say: write `python -m functional.suite.report` to it"
    )


def test_a_field_is_required_in_the_schema_where_every_report_has_it():
    assert set(json.loads(json_schema())["required"]) == ALWAYS


def test_what_an_image_says_of_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("RELEASE_DIR", str(tmp_path))
    build = {"inputs": {"functional": "0" * 64}, "profile": "cpu", "environments": {"trainer": {"python": "3.13.5"}}}
    (tmp_path / "build.json").write_text(json.dumps(build))
    release = read_release()
    assert release.model_dump(exclude_unset=True) == {"build": build}
    (tmp_path / "image.json").write_text('{"digest": 3}')
    with pytest.raises(ConfigError, match=r"image\.json: digest: .*this image is damaged") as refusal:
        read_release()
    assert "\n" not in str(refusal.value)

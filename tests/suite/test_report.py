"""Report and JUnit XML agree with the checks, and a failed or absent check never reads as passed."""

import json
from xml.etree import ElementTree

import pytest

from functional.suite.checks import Checklist
from functional.suite.report import write_report


def outcome(tmp_path, checks, error=None):
    write_report(tmp_path, {"seconds": 1.5}, checks.checks, error)
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    return json.loads((tmp_path / "report.json").read_text()), suite


def test_all_passed(tmp_path):
    checks = Checklist()
    checks.add("a", True, "fine", value=1)
    report, suite = outcome(tmp_path, checks)
    assert report["status"] == "passed"
    assert report["checks"][0] == {"name": "a", "passed": True, "detail": "fine", "figures": {"value": 1}}
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "0")
    assert [case.get("name") for case in suite.iter("testcase")] == ["a"]


@pytest.mark.parametrize("error", [None, "worker 0 was killed\nmore"])
def test_one_failed(tmp_path, error):
    checks = Checklist()
    checks.add("a", True, "fine")
    checks.add("b", False, "no <good> \x1b[31m")
    report, suite = outcome(tmp_path, checks, error)
    assert report["status"] == "failed"
    assert report["error"] == error
    failure = suite.find("./testcase[@name='b']/failure")
    assert failure is not None
    assert "no <good>" in failure.get("message", "")
    assert suite.get("errors") == ("1" if error else "0")
    names = ["run", "a", "b"] if error else ["a", "b"]
    assert [case.get("name") for case in suite.iter("testcase")] == names
    assert suite.get("tests") == str(len(names))


def test_no_checks_at_all_is_a_failure(tmp_path):
    report, _ = outcome(tmp_path, Checklist())
    assert report["status"] == "failed"
    assert not Checklist().passed

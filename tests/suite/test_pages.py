"""What the pages say of a run: nothing that it did not prove, nothing unescaped, and never at the cost of the run."""

import json
import os
import time
from html.parser import HTMLParser

import pytest

from functional.runtime.errors import ConfigError
from functional.runtime.refit.parts import Replacement
from functional.suite.checklist import Check, Checklist
from functional.suite.hardware import UsageSampler, read_hardware
from functional.suite.outcome import write_pages_or_say
from functional.suite.pages.plots import Series, lines
from functional.suite.pages.render import write_pages
from functional.suite.pages.verdict import by_section, chain, conditions
from functional.suite.report import Image, Report, write_report
from tests.suite.sample_pages import HOSTILE, begun, ended_early, long_run, update

ALL = ("step1.tokens_correct", "step1.stale_weights_refused", "post_update.generation")


class Tags(HTMLParser):
    """Which elements a page has, and where its links lead."""

    def __init__(self, text):
        super().__init__()
        self.seen, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]


def ended(out, names=ALL, failed=(), replaced=0):
    report = begun(out)
    checks = Checklist()
    for name in names:
        checks.add(name, name not in failed, "seen")
    if replaced:
        one = update(1, {"drain": 1.0})
        one.replaced = [Replacement(0, "worker 0: gone", 1, 2, 3.0)] * replaced
        report.refits.append(one)
    report.finish(checks, None, 1.0)
    return report


def proved(report):
    return {one.name for one in conditions(report) if one.proved}


def test_only_what_a_run_proved_counts(tmp_path):
    most = {"Token correctness", "Policy refit", "Post-update generation"}
    assert proved(ended(tmp_path)) == most
    assert proved(ended(tmp_path, replaced=1)) == {*most, "Failure recovery"}
    assert proved(ended(tmp_path, names=ALL[1:])) == most - {"Token correctness"}
    for name, lost in zip(ALL, ("Token correctness", "Policy refit", "Post-update generation"), strict=True):
        assert proved(ended(tmp_path, failed=[name], replaced=1)) == most - {lost}
    assert proved(begun(tmp_path)) == set()
    assert proved(ended(tmp_path, names=("step1.chat.tokens_correct", *ALL[1:]))) == most, "by chat as by token IDs"


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("step12.chat.exact_prefixes", "Token correctness"),
        ("step1.chat.rewards_differ", "Learning"),
        ("step1.stale_weights_refused", "Policy refit"),
        ("step3.replacement.weights_proved", "Policy refit"),
        ("identity.requests_joined", "Token correctness"),
        ("routing.cache_events", "Routing and telemetry"),
        ("fault.lying-send-flip", "Recovery and teardown"),
        ("something.new", "Other checks"),
    ],
)
def test_a_check_stands_under_its_heading(name, heading):
    assert [found for found, _ in by_section([Check(name, True, "")])] == [heading]


def test_a_run_that_ended_early_and_what_it_said(tmp_path):
    ended_early(tmp_path)
    page = (tmp_path / "report.html").read_text()
    tags = Tags(page)
    assert "Failed: 0 of 1 checks" in page
    assert "The run ended early: <code>worker 0 exited with status 1" in page
    assert "script" not in tags.seen
    assert HOSTILE.split(" |")[0] not in page + (tmp_path / "report.md").read_text()
    assert all(not link.startswith(("http", "//")) for link in tags.links)
    table = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| teardown")]
    assert [line.replace("\\|", "").count("|") for line in table] == [4]


def test_a_long_run_is_shown_in_bounded_size(tmp_path):
    long_run(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 2_000_000
    assert "Passed: 3000 of 3000" in page
    assert "version 17, attempt 1" in page, "an attempt that failed is shown, however long ago"
    assert "2987 earlier attempts without a failure" in page
    assert "nan" not in page.lower().replace("nanos", "")
    assert {"GPU use", "GPU memory", "Processor use"} <= {
        title for title in ("GPU use", "GPU memory", "Processor use") if title in page
    }


def test_the_chain_is_that_of_the_host_and_of_the_image(tmp_path):
    report = ended(tmp_path)
    report.release.image = Image(digest="sha256:1")
    states = {link.name: link.state for link in chain(report, tmp_path)}
    assert states == {"Sources": "unknown", "Image": "yes", "Squashfs": "unknown", "Run": "yes"}
    (tmp_path / "release.json").write_text(json.dumps({"image_digest": "sha256:2", "sqsh_sha256": "3"}))
    states = {link.name: link.state for link in chain(report, tmp_path)}
    assert (states["Image"], states["Squashfs"]) == ("no", "yes")
    told = {"image_digest": "sha256:1", "sqsh_sha256": "3", "sqsh_hashed": "before the job was submitted"}
    (tmp_path / "release.json").write_text(json.dumps(told))
    because = {link.name: link.why for link in chain(report, tmp_path)}
    assert because["Squashfs"] == "hashed before the job was submitted, as in the release's record"
    (tmp_path / "release.json").write_text("[")
    assert chain(report, tmp_path)[1].state == "yes"


def test_no_page_is_no_failure(tmp_path, capsys):
    write_pages_or_say(tmp_path)
    assert "warning: no report.html: ConfigError: " in capsys.readouterr().err
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(ConfigError, match="is no report of this version"):
        write_pages(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json"]


def test_a_broken_file_beside_the_report_is_told(tmp_path):
    write_report(tmp_path, ended(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("{]\n{}\n")
    write_pages(tmp_path)
    assert "metrics.jsonl could not be read" in (tmp_path / "report.html").read_text()


def test_thinning_keeps_every_peak():
    points = [(float(x), 100.0 if x == 4321 else 1.0) for x in range(10_000)]
    plot = lines("t", "a", [Series("s", points)], "x", "y")
    assert plot is not None
    assert any(row[2] == "100" for row in plot.rows) or plot.left_out > 0
    assert plot.svg.count("L") < 1000
    assert lines("t", "a", [Series("s", [(0.0, float("nan"))])], "x", "y") is None


def test_use_is_sampled_by_part(tmp_path):
    """As much as this process says it used, however busy the machine is."""
    sampler = UsageSampler(tmp_path / "usage.jsonl", lambda: {"driver": [os.getpid()]})
    sampler.sample()
    began, used_before = time.monotonic(), time.process_time()
    while time.process_time() < used_before + 0.5:
        sum(range(10_000))
    row = sampler.sample()
    expected = (time.process_time() - used_before) / (time.monotonic() - began)
    used, resident = row["parts"]["driver"]
    assert used == pytest.approx(expected, rel=0.25)
    assert resident > 10**7
    with sampler:
        time.sleep(1.5)
    assert (tmp_path / "usage.jsonl").read_text().count("\n") >= 1
    found = read_hardware()
    assert found.cores >= 1
    assert found.memory_bytes > resident
    assert Report.model_fields["hardware"].is_required() is False

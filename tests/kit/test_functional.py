"""The host side of the suite, with a fake suite inside a real squashfs; and verify on the result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.errors import KitError
from kit.files import sha256_of
from kit.functional import Counts, count_results
from kit.record import ImageSection, PushSection, add_section, start_record
from kit.report import Report, read_report
from kit.sources import lock_hashes, source_hashes
from tests.kit.conftest import REPO, Kit, refused
from tests.kit.tiny_image import Entry, busybox, folder

JUNIT = """<testsuites><testsuite><testcase name="a"/><testcase name="b"/>\
<testcase name="c"><failure/></testcase><testcase name="d"><error/></testcase><testcase name="e"><skipped/></testcase>\
</testsuite></testsuites>"""
CHECKS = '[{"name": "a", "passed": true}, {"name": "b", "passed": true}, {"name": "c", "passed": false}]'
HEAD = '"schema_version": 1, "status": "failed", "error": "ended early"'
PASSING_JUNIT = """<testsuites><testsuite><testcase name="a"/><testcase name="b"/>\
<testcase name="e"><skipped/></testcase></testsuite></testsuites>"""
PASSING_CHECKS = '[{"name": "a", "passed": true}, {"name": "b", "passed": true}]'
PASSING_HEAD = '"schema_version": 1, "status": "passed", "error": null'
INPUTS = {"trainer-cpu": "1" * 64, "functional": "2" * 64}
# Takes the place of uv: writes what the suite writes, and ends as the recipe's name says.
STAND_IN = f"""#!/bin/sh
echo "$@" "recipe=$RECIPE" > "$FUNCTIONAL_OUT/words"
mkdir -p "$FUNCTIONAL_OUT/logs"; ls /sys/class/net > "$FUNCTIONAL_OUT/logs/net"
case "$RECIPE" in
*silent*) exit 3 ;;
*slow*)
  cd "$FUNCTIONAL_OUT"
  trap 'echo stopped > words; echo {{}} > report.json; echo "<x/>" > junit.xml; exit 1' INT TERM
  echo started
  while :; do sleep 0.05; done ;;
esac
echo "<p>$RECIPE</p>" > "$FUNCTIONAL_OUT/report.html"
case "$RECIPE" in
*failing*)
  echo '{JUNIT}' > "$FUNCTIONAL_OUT/junit.xml"
  echo '{{{HEAD}, "checks": {CHECKS}, "release": {{' > "$FUNCTIONAL_OUT/report.json" ;;
*)
  echo '{PASSING_JUNIT}' > "$FUNCTIONAL_OUT/junit.xml"
  echo '{{{PASSING_HEAD}, "checks": {PASSING_CHECKS}, "release": {{' > "$FUNCTIONAL_OUT/report.json" ;;
esac
echo '"image": '"$(cat /opt/release/image.json)"',' >> "$FUNCTIONAL_OUT/report.json"
echo '"build": '"$(cat /opt/release/build.json)" >> "$FUNCTIONAL_OUT/report.json"
echo '}}}}' >> "$FUNCTIONAL_OUT/report.json"
case "$RECIPE" in
*failing*) exit 1 ;;
*broken*) echo '{{{HEAD}, "checks": [{{"name": "a", "passed": 2}}], "release": {{}}}}' >"$FUNCTIONAL_OUT/report.json" ;;
esac
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a squashfs needs root")


@pytest.fixture
def made(kit: Kit) -> Path:
    """A release with its squashfs; the answer is its folder."""
    build = [folder("opt/release"), Entry("opt/release/build.json", json.dumps({"inputs": INPUTS}).encode())]
    layers = [[*busybox("uv"), folder("opt")], [Entry("bin/uv", STAND_IN.encode(), 0o755), *build]]
    kit.release("tiny", layers, {"WorkingDir": "/opt"}, INPUTS)
    finished = kit("sqsh", "--name", "tiny")
    assert finished.returncode == 0, finished.stderr
    return kit.root / "dist/tiny"


def functional(made: Path) -> dict[str, Any] | None:
    section = json.loads((made / "record.json").read_text()).get("functional")
    assert section is None or isinstance(section, dict)
    return section


@needs_root
@pytest.mark.sqsh
@pytest.mark.usefixtures("nothing_left")
class TestFunctional:
    def test_results_come_out_and_into_the_record(self, kit: Kit, made: Path) -> None:
        finished = kit("functional", "--engine", "own", "recipes/x.yaml", "grpo.seed=7", "a.b=c d")
        assert finished.returncode == 0, finished.stderr
        words = (made / "functional/words").read_text()
        assert words == "run bash tests/functional/grpo_dynamo.sh grpo.seed=7 a.b=c d recipe=recipes/x.yaml\n"
        assert (made / "functional/logs/net").read_text() == "lo\n"
        section = functional(made)
        assert section is not None
        assert [section[key] for key in ("status", "passed", "failed", "skipped")] == ["passed", 2, 0, 1]
        assert section["image_digest"] == json.loads((made / "oci/index.json").read_text())["manifests"][0]["digest"]
        assert section["pages"] == {"report.html": sha256_of(made / "functional/report.html")}
        facts = json.loads((made / "functional/release.json").read_text())
        assert facts["image_digest"] == section["image_digest"]
        assert facts["sqsh_sha256"] == section["sqsh_sha256"] == sha256_of(made / "tiny.sqsh")
        assert facts["inputs"] == INPUTS
        assert facts["commit"] is None  # this copy of the kit is no checkout
        assert kit("verify", "tiny").returncode == 0

    def test_options_of_the_suite_are_given_after_two_dashes(self, kit: Kit, made: Path) -> None:
        options = ("--driver=nemo-rl", "--share-gpu", "recipes/x.yaml", "+data.train.data_path=/data/x")
        assert kit("functional", "--engine", "own", "--", *options).returncode == 0
        words = (made / "functional/words").read_text()
        assert words.endswith(
            "grpo_dynamo.sh --driver=nemo-rl --share-gpu +data.train.data_path=/data/x recipe=recipes/x.yaml\n"
        )
        refused(kit("functional", "--", "--driver=nemo-rl", "a.yaml", "b.yaml"), 2, "two recipes: a.yaml and b.yaml")

    def test_a_failing_suite_is_a_result_too(self, kit: Kit, made: Path) -> None:
        assert kit("functional", "--engine", "own").returncode == 0
        assert kit("functional", "--engine", "own", "failing").returncode == 1
        section = functional(made)
        assert section is not None
        assert [section[key] for key in ("status", "passed", "failed", "skipped")] == ["failed", 2, 2, 1]
        assert kit("verify", "tiny").returncode == 0
        assert "recipe=failing" in (made / "functional/words").read_text()

    def test_without_a_report_the_earlier_one_stays(self, kit: Kit, made: Path) -> None:
        assert kit("functional", "--engine", "own").returncode == 0
        before = functional(made)
        finished = kit("functional", "--engine", "own", "silent")
        assert finished.returncode == 1
        assert "error: the suite ended with status 3 before its report" in finished.stderr
        assert functional(made) == before
        assert "recipe=silent" in (made / "functional.incomplete/words").read_text()
        assert kit("verify", "tiny").returncode == 0

    def test_a_report_that_is_none_is_not_recorded(self, kit: Kit, made: Path) -> None:
        assert kit("functional", "--engine", "own").returncode == 0
        before = functional(made)
        finished = kit("functional", "--engine", "own", "broken")
        refused(finished, 1, "report.json is not a report of the suite (checks.0.passed: ", "functional.incomplete")
        assert functional(made) == before
        assert "recipe=broken" in (made / "functional.incomplete/words").read_text()
        assert kit("verify", "tiny").returncode == 0

    @pytest.mark.faults
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted(self, kit: Kit, made: Path, number: signal.Signals) -> None:
        assert kit("functional", "--engine", "own").returncode == 0
        before = functional(made)
        process = kit.start("functional", "--engine", "own", "slow")
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert "error: the suite was interrupted: " in process.communicate(timeout=20)[1]
        assert process.returncode == 1
        assert (made / "functional.incomplete/words").read_text() == "stopped\n"
        assert [path.name for path in made.glob(".*")] == []
        assert functional(made) == before
        assert kit("verify", "tiny").returncode == 0

    @pytest.mark.faults
    def test_second_run_while_one_is_running(self, kit: Kit, made: Path) -> None:
        process = kit.start("functional", "--engine", "own", "slow")
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        refused(kit("functional", "--engine", "own"), 1, "another 'functional-tiny' is running here", str(process.pid))
        process.terminate()
        process.communicate(timeout=20)

    @pytest.mark.faults
    def test_another_squashfs_than_the_records_is_not_run(self, kit: Kit, made: Path) -> None:
        with (made / "tiny.sqsh").open("ab") as file:
            file.write(b"x")
        finished = kit("functional", "--engine", "own")
        assert finished.returncode == 1
        assert "is not the squashfs in" in finished.stderr
        assert "make sqsh NAME=tiny" in finished.stderr

    @pytest.mark.faults
    def test_no_release(self, kit: Kit) -> None:
        finished = kit("functional")
        assert finished.returncode == 2
        assert finished.stderr == "error: there is no release with a squashfs in dist: make one: make image sqsh\n"
        finished = kit("functional", "--name", "cpu")
        assert finished.returncode == 2
        assert "no squashfs at" in finished.stderr

    def test_two_recipes(self, kit: Kit, made: Path) -> None:
        assert kit("functional", "a.yaml", "b.yaml").returncode == 2

    def test_a_mount_and_a_variable(self, kit: Kit, made: Path) -> None:
        (kit.root / "data").mkdir()
        mount = f"{kit.root}/data:/results/logs/net:ro"
        refused(kit("functional", "--mount", mount), 2, "a mount over /results/logs/net would change the image")
        refused(kit("functional", "--mount", f"{kit.root}/data:/opt/x"), 2, "mount it elsewhere, say /data")
        for target in ("/x/../opt", "//opt/x", "/"):
            refused(kit("functional", "--mount", f"{kit.root}/data:{target}"), 2, f"a mount over {target} would change")
        for name in ("PYTHONPATH", "PATH", "LD_PRELOAD", "DYNAMO_VENV", "ETCD_BIN", "FUNCTIONAL_OUT"):
            refused(kit("functional", "--env", f"{name}=/data"), 2, f"{name} could have other programs run")
        finished = kit("functional", "--engine", "own", "--mount", f"{kit.root}/data:/data", "--env", "RECIPE=mine")
        assert finished.returncode == 0, finished.stderr
        assert "recipe=mine" in (made / "functional/words").read_text()

    def test_the_result_of_another_machine(self, kit: Kit, made: Path) -> None:
        """ci/gpu_release.sh on two copies of the kit: what it carries and brings is a release's squashfs and result."""
        there = kit.root.with_name("there")
        for root in (kit.root, there):
            shutil.copytree(REPO / "ci", root / "ci")
            if root is there:
                for package in ("kit", "sqsh"):
                    shutil.copytree(kit.root / package, there / package)
                shutil.copy(kit.root / "build.py", there)
        (kit.root / ".venv/bin").mkdir(parents=True)
        (kit.root / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (kit.root / ".venv/bin/python").chmod(0o755)

        def step(root: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
            settings = {"NAME": "tiny", "PYTHON": sys.executable, "STORE": str(there / "store"), "PART_BYTES": "700000"}
            paths = {"KIT_STATE": str(root / "state"), "OUT": str(there / "out"), "UV": str(REPO / ".state/uv/bin/uv")}
            settings |= {
                "STAGES": "functional,verify",
                **paths,
                "THEIR_PYTHON": f"{sys.version_info.major}.{sys.version_info.minor}",
            }
            command = ["bash", "ci/gpu_release.sh", *map(str, words)]
            environment = {**kit.env, **settings}
            shutil.copytree(REPO / "lockfiles", root / "lockfiles", dirs_exist_ok=True)
            return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)

        finished = step(kit.root, "pack")
        assert finished.returncode == 0, finished.stderr
        parts = sorted((kit.root / ".carry").glob("part???"))
        assert len(parts) >= 3
        for part in parts[:-1]:
            assert step(there, "take", part).returncode == 0
        refused(step(there, "run"), 2, f"not in {there / 'store'}: {parts[-1].name}: carry them")
        whole = (parts[-1] / parts[-1].name).read_bytes()
        (parts[-1] / parts[-1].name).write_bytes(whole[:-1])
        assert "is damaged: carry it again" in step(there, "take", parts[-1]).stderr
        (parts[-1] / parts[-1].name).write_bytes(whole)
        assert step(there, "take", parts[-1]).returncode == 0
        finished = step(there, "run")
        assert finished.returncode == 0, finished.stderr
        assert step(there, "run", "failing").returncode == 1  # again, on what is joined already
        assert step(kit.root, "bring", there / "out/release.tgz").returncode == 1
        section = functional(made)
        assert section is not None
        assert [section[key] for key in ("status", "passed", "failed", "skipped")] == ["failed", 2, 2, 1]
        assert kit("verify", "tiny").returncode == 0

        report = there / "dist/tiny/functional/report.json"
        report.write_text(report.read_text().replace("ended early", "never mind"))
        refused(
            kit("functional", "--name", "tiny", "--from", there / "dist/tiny"), 1, "not the one that its record names"
        )
        assert functional(made) == section

        finished = step(there, "night")  # verify fails: the image itself was not carried
        assert finished.returncode == 1
        assert "error: the night failed in 'verify'" in finished.stdout
        with tarfile.open(there / "out/night.tgz") as archive:
            names = {Path(name).name for name in archive.getnames()}
        assert {"history.jsonl", "timings.json", "report.html", "release.html", "nightly.log"} <= names


def failures(kit: Kit) -> dict[tuple[str, str], str]:
    """What verify finds wrong: section and comparison, and how the two differ."""
    finished = kit("verify", "tiny", "--json")
    assert finished.returncode == 1
    found = [entry for entry in json.loads(finished.stdout) if entry["result"] == "failed"]
    return {(entry["section"], entry["what"]): entry["detail"] for entry in found}


@needs_root
@pytest.mark.sqsh
class TestVerify:
    @pytest.mark.parametrize(
        ("damaged", "finding"),
        [
            ("oci", "✗ image: layout"),
            ("oci/index.json", "✗ image: layout"),
            ("tiny.sqsh", "✗ sqsh: sha256 of the file"),
            ("functional/report.json", "✗ functional: sha256 of the report"),
            ("functional/report.html", "✗ functional: sha256 of report.html"),
        ],
    )
    def test_every_artifact_is_held_against_its_section(self, kit: Kit, made: Path, damaged: str, finding: str) -> None:
        assert kit("functional", "--engine", "own").returncode == 0
        assert kit("verify", "tiny").returncode == 0
        place = made / damaged
        if place.is_dir():
            place = max(place.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
        with place.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
        finished = kit("verify", "tiny")
        assert finished.returncode == 1
        assert finding in finished.stderr

    def test_every_word_of_the_record_is_held_against_what_is_there(self, kit: Kit, made: Path) -> None:
        assert kit("functional", "--engine", "own").returncode == 0
        text = (made / "record.json").read_text()
        changes: list[tuple[str, dict[str, object], str]] = [
            ("image", {"inputs": {**INPUTS, "functional": "3" * 64}}, "inputs in the image's /opt/release/build.json"),
            ("image", {"size": 3}, "what the manifest says"),
            ("image", {"media_type": "text/plain"}, "what the manifest says"),
            ("image", {"layers": []}, "what the manifest says"),
            ("sqsh", {"size": 3}, "bytes of the file"),
            ("functional", {"status": "failed"}, "outcome of the report"),
            ("functional", {"passed": 3}, "checks in the report"),
            ("functional", {"failed": 1}, "checks in the report"),
            ("functional", {"image_digest": f"sha256:{'1' * 64}"}, "image it proved"),
            ("functional", {"sqsh_sha256": "1" * 64}, "squashfs it ran in"),
        ]
        for section, change, what in changes:
            record = json.loads(text)
            record[section] |= change
            (made / "record.json").write_text(json.dumps(record))
            assert (section, what) in failures(kit), what

    def test_a_report_of_other_locks_or_of_another_image(self, kit: Kit, made: Path) -> None:
        """Also where its hash is the recorded one: the suite may have run in another image than was recorded."""
        assert kit("functional", "--engine", "own").returncode == 0
        text = (made / "functional/report.json").read_text()
        changes: list[tuple[str, dict[str, object], str]] = [
            ("build", {"inputs": {**INPUTS, "trainer-cpu": "3" * 64}}, "inputs the report names"),
            ("build", {"inputs": {"functional": INPUTS["functional"]}}, "inputs the report names"),
            ("build", {}, "inputs the report names"),
            ("image", {"digest": f"sha256:{'1' * 64}"}, "image the report names"),
        ]
        for key, value, what in changes:
            report = json.loads(text)
            report["release"][key] = value
            (made / "functional/report.json").write_text(json.dumps(report))
            record = json.loads((made / "record.json").read_text())
            record["functional"]["sha256"] = sha256_of(made / "functional/report.json")
            (made / "record.json").write_text(json.dumps(record))
            found = failures(kit)
            assert list(found) == [("functional", what)]
            if value.get("inputs") == {**INPUTS, "trainer-cpu": "3" * 64}:
                assert found["functional", what] == f"trainer-cpu: recorded {'1' * 64}, found {'3' * 64}"

    def test_a_report_that_is_none(self, kit: Kit, made: Path) -> None:
        """Also where its hash is the recorded one."""
        assert kit("functional", "--engine", "own").returncode == 0
        report = json.loads((made / "functional/report.json").read_text())
        del report["status"]
        (made / "functional/report.json").write_text(json.dumps(report))
        record = json.loads((made / "record.json").read_text())
        record["functional"]["sha256"] = sha256_of(made / "functional/report.json")
        (made / "record.json").write_text(json.dumps(record))
        found = failures(kit)
        assert list(found) == [("functional", "report")]
        assert "(status: Field required)" in found["functional", "report"]

    def test_other_sources_in_the_checkout_are_told_and_no_failure(self, kit: Kit, made: Path) -> None:
        for name in ("docker", "functional", "tests/functional", "lockfiles"):
            shutil.copytree(REPO / name, kit.root / name)
        shutil.copy(REPO / ".dockerignore", kit.root)
        inputs = {**source_hashes(kit.root), **lock_hashes(kit.root, ["trainer-cpu"])}
        record = json.loads((made / "record.json").read_text())
        record["image"]["inputs"] = inputs
        (made / "record.json").write_text(json.dumps(record))
        assert "✓ image: sources and locks of this checkout" in kit("verify", "tiny").stderr
        with (kit.root / "lockfiles/trainer-cpu.txt").open("a") as file:
            file.write("# changed\n")
        (kit.root / "functional/engine/wire.py").unlink()
        said = [line for line in kit("verify", "tiny").stderr.splitlines() if "of this checkout" in line]
        assert said[0].startswith("? image:")
        assert said[0].endswith(" (the image was made of another state of functional, trainer-cpu)")

    def test_a_squashfs_of_another_image(self, kit: Kit, made: Path) -> None:
        text = (made / "record.json").read_text()
        record = json.loads(text)
        (made / "record.json").write_text(text.replace(record["image"]["digest"], "sha256:" + "1" * 64))
        found = json.loads(kit("verify", "tiny", "--json").stdout)
        assert {(entry["section"], entry["what"]) for entry in found if entry["result"] == "failed"} == {
            ("image", "digest of oci/, over every blob"),
            ("sqsh", "digest inside"),
        }

    def test_registry_out_of_reach_is_unknown_not_wrong(self, kit: Kit, made: Path) -> None:
        record = json.loads((made / "record.json").read_text())
        push = {"time": record["image"]["time"], "reference": "127.0.0.1:9/x:y", "digest": record["image"]["digest"]}
        (made / "record.json").write_text(json.dumps({**record, "push": push}))
        finished = kit("verify", "tiny")
        assert finished.returncode == 0
        assert "? push: digest that 127.0.0.1:9/x:y has" in finished.stderr
        assert "connection refused" in finished.stderr

    def test_no_release(self, kit: Kit) -> None:
        finished = kit("verify", "none")
        assert finished.returncode == 1
        assert "no record at" in finished.stderr


@pytest.mark.unit
def test_counts(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert count_results(tmp_path / "junit.xml") == Counts(passed=2, failed=2, skipped=1)
    (tmp_path / "junit.xml").write_text(JUNIT[:50])
    with pytest.raises(KitError, match="no JUnit XML"):
        count_results(tmp_path / "junit.xml")


REPORT: dict[str, Any] = {
    "schema_version": 1,
    "status": "passed",
    "error": None,
    "release": {"build": {"inputs": INPUTS, "profile": "cpu"}, "image": {"digest": "sha256:1", "name": "cpu"}},
    "checks": [{"name": "a", "passed": True, "detail": "fine"}, {"name": "b", "passed": False, "detail": "no"}],
    "seconds": 1.5,
}


@pytest.mark.unit
def test_what_is_read_of_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    report = read_report(path)
    assert (report.image_digest, report.inputs) == ("sha256:1", INPUTS)
    assert (report.passed, report.failed) == (1, 1)
    path.write_text(json.dumps(REPORT | {"error": "ended early", "release": {}}))
    report = read_report(path)
    assert (report.image_digest, report.inputs) == (None, {})
    assert (report.passed, report.failed) == (1, 2)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "the file: "),
        ("[" * 100_000, "recursion"),
        ('{"seconds": NaN}', "NaN is no JSON"),
        ('"\\udc00"', "the file: "),
        (json.dumps(REPORT | {"schema_version": 2}), "schema_version: Input should be 1"),
        (json.dumps(REPORT | {"status": "fine"}), "status: Input should be 'passed' or 'failed'"),
        (json.dumps({key: REPORT[key] for key in REPORT if key != "error"}), "error: Field required"),
        (json.dumps(REPORT | {"checks": [{"name": "a"}]}), "checks.0.passed: Field required"),
        (json.dumps(REPORT | {"checks": [{"name": "a", "passed": 1}]}), "checks.0.passed: Input should be a valid bo"),
        (json.dumps(REPORT | {"release": {"image": {"digest": 1}}}), "release.image.digest: "),
        (json.dumps(REPORT | {"release": {"build": {"inputs": [1]}}}), "release.build.inputs: "),
    ],
)
def test_a_report_that_is_none_is_one_line_naming_the_key(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(KitError) as refusal:
        read_report(tmp_path / "report.json")
    assert str(refusal.value).startswith("report.json is not a report of the suite (")
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.unit
def test_what_the_kit_reads_is_as_the_suite_publishes_it() -> None:
    published = json.loads((REPO / "functional/suite/report.schema.json").read_text())
    assert list(differences(Report.model_json_schema(), published)) == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("wrong", "difference"),
    [
        ({"properties": {"gone": {"type": "string"}}}, "gone: not published"),
        ({"properties": {"checks": {"type": "object"}}}, "checks: want object, published array"),
        ({"properties": {"parameters": {}}, "required": ["parameters"]}, "parameters: not always there"),
        (
            {"properties": {"release": {"type": "object", "properties": {"build": {"type": "object"}}}}},
            "release.build: want",
        ),
        ({"properties": {"status": {"enum": ["passed"]}}}, "status: want ['passed']"),
    ],
)
def test_a_difference_from_what_is_published_is_found(wrong: dict[str, Any], difference: str) -> None:
    published = json.loads((REPO / "functional/suite/report.schema.json").read_text())
    (found,) = differences(wrong, published)
    assert found.startswith(difference)


def differences(wanted: dict[str, Any], published: dict[str, Any]) -> Iterator[str]:
    """Where a JSON Schema does not take everything that another one allows, in the properties of the first."""

    def resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        return node

    def kinds(node: dict[str, Any], schema: dict[str, Any]) -> dict[Any, dict[str, Any]]:
        """The alternatives, by type or, where the values are listed, by these."""
        parts = [resolved(part, schema) for part in resolved(node, schema).get("anyOf", [node])]
        return {str(part.get("enum", part.get("const", part.get("type")))): part for part in parts}

    def compare(place: str, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
        mine, given = kinds(ours, wanted), kinds(theirs, published)
        if "None" not in mine and not given.keys() <= mine.keys():
            yield f"{place}: want {', '.join(mine)}, published {', '.join(given)}"
            return
        for kind in mine.keys() & given.keys():
            yield from below(f"{place}." if place else "", mine[kind], given[kind])

    def below(prefix: str, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
        for name, node in ours.get("properties", {}).items():
            if name not in theirs.get("properties", {}):
                yield f"{prefix}{name}: not published"
            elif name in ours.get("required", []) and name not in theirs.get("required", []):
                yield f"{prefix}{name}: not always there"
            else:
                yield from compare(f"{prefix}{name}", node, theirs["properties"][name])
        if "items" in ours:
            yield from compare(f"{prefix}0", ours["items"], theirs["items"])

    yield from below("", resolved(wanted, wanted), resolved(published, published))


@pytest.mark.unit
def test_a_section_is_never_added_to_another_images_record(tmp_path: Path) -> None:
    """As when the image was built anew while its squashfs was being made."""
    one, other = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
    image = ImageSection(
        name="x",
        profile="cpu",
        digest=one,
        media_type="m",
        size=1,
        layers=[],
        key="0" * 64,
        inputs={},
        source_date_epoch=0,
    )
    start_record(tmp_path / "record.json", image)
    add_section(tmp_path / "record.json", PushSection(reference="r", digest=one))
    with pytest.raises(KitError, match="now of another image than this 'push'"):
        add_section(tmp_path / "record.json", PushSection(reference="r", digest=other), replace=True)

"""Run the functional suite inside a release's squashfs, with no network, and record what it proved."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path, PurePosixPath
from typing import Literal

from kit.container_init import Mount
from kit.errors import KitError, UsageError
from kit.files import sha256_of
from kit.layout import REPO, Release, only_run, release, scratch_folder
from kit.record import FunctionalSection, JobFacts, Record, add_section, read_record
from kit.release_facts import FACTS, write_facts
from kit.report import read_report
from kit.run import Container, Ended, check_squashfs, parse_env, parse_mount, run_container
from kit.steps import say

COMMAND = ("uv", "run", "bash", "tests/functional/grpo_dynamo.sh")
RESULTS = "/results"  # in the container
STOP_WITHIN_S = 60.0
OTHER_PROGRAMS = re.compile(r"PATH|ENV|BASH_ENV|ETCD_BIN|NATS_SERVER_BIN|(LD|UV|DYNAMO|FUNCTIONAL|PYTHON).*")
OF_THE_IMAGE = {
    ("/",),
    *(("/", name) for name in ("bin", "etc", "lib", "lib64", "opt", "results", "root", "sbin", "usr")),
}
WORK_PREFIX = ".functional-"
PAGES = ("report.html", "report.md")


@dataclass(frozen=True)
class Counts:
    passed: int
    failed: int
    skipped: int


def run_functional(
    name: str,
    words: Sequence[str] = (),
    *,
    mounts: Sequence[str] = (),
    env: Sequence[str] = (),
    engine: str = "auto",
) -> int:
    """Run the suite in `dist/<name>/<name>.sqsh`; its files go to `dist/<name>/functional`. The answer is its status.

    A run that reached its report replaces the earlier one, passed or not. One that did not, or was interrupted, is
    kept apart in `functional.incomplete`, and the earlier report and its section stay.
    """
    recipe, others = find_recipe(words)
    asked, variables = data_mounts(mounts), parse_env(env)
    for variable in variables:
        if OTHER_PROGRAMS.fullmatch(variable):
            raise UsageError(f"{variable} could have other programs run than the image's", "leave it to the image")
    made = release(name)
    with only_run(f"functional-{name}"):
        record = checked_release(made)
        for left in made.folder.glob(f"{WORK_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        results = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=made.folder))
        try:
            write_facts(record, results / FACTS)
            say(f"running the suite in {made.sqsh.name}; its log goes to {made.functional}/logs at the end")
            ended = run_container(_container(made, results, recipe, others, asked, variables), engine)
            record_results(made, record, results, ended)
        finally:
            shutil.rmtree(results, ignore_errors=True)
        return ended.status


def find_recipe(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe among the words for the suite, and the others: settings, and options as --NAME or --NAME=VALUE.

    Raises UsageError for two recipes.
    """
    others = [word for word in words if "=" in word or word.startswith("-")]
    recipes = [word for word in words if word not in others]
    if len(recipes) > 1:
        hint = "name one; settings are written key=value, and options --name=value"
        raise UsageError(f"two recipes: {' and '.join(recipes)}", hint)
    return next(iter(recipes), None), others


def data_mounts(texts: Sequence[str]) -> list[Mount]:
    """Mounts for a run that is to be recorded. Raises UsageError for one over what the image holds: the record would be
    of something that was not run."""
    mounts = [parse_mount(text) for text in texts]
    for target in (mount["target"] for mount in mounts):
        if PurePosixPath("/", normpath(target).lstrip("/")).parts[:2] in OF_THE_IMAGE:
            raise UsageError(
                f"a mount over {target} would change the image that is proved", "mount it elsewhere, say /data"
            )
    return mounts


def adopt_functional(name: str, other: Path) -> int:
    """Take the result of a run of this very squashfs on another machine, from its release folder or a .tgz of it.

    The answer is the status of that run's suite, as of a run here.
    """
    made = release(name)
    with only_run(f"functional-{name}"), scratch_folder("functional") as scratch:
        record = checked_release(made)
        folder = _unpacked(other, scratch) if other.is_file() else other
        theirs = read_record(folder / made.record.name)
        if theirs.functional is None:
            raise KitError(f"{other} has no result of the suite", "run it there: ./build.py functional")
        if (theirs.image.digest, theirs.sqsh) != (record.image.digest, record.sqsh):
            raise KitError(f"{other} is of another squashfs than {made.sqsh}", "carry this one there, and run it again")
        results = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=made.folder))
        try:
            shutil.copytree(folder / made.functional.name, results, dirs_exist_ok=True)
            status = {"passed": 0, "failed": 1, "error": 2}[theirs.functional.status]
            if why := _unfit(Ended(status, interrupted=False), results):
                raise KitError(f"{other}: {why}", "run it there again")
            section = _section(record, results, made, status, theirs.functional.job)
            if section.model_dump(exclude={"time"}) != theirs.functional.model_dump(exclude={"time"}):
                raise KitError(f"{other}: the report is not the one that its record names", "bring it again")
            if read_report(results / "report.json").image_digest != record.image.digest:
                raise KitError(f"{other}: the report is of another image", "run it there again")
            _move(results, made.functional)
            add_section(made.record, theirs.functional, replace=True)
        finally:
            shutil.rmtree(results, ignore_errors=True)
    say(f"suite {section.status} there: {section.passed} passed, {section.failed} failed, {section.skipped} skipped")
    return status


def record_results(made: Release, record: Record, results: Path, ended: Ended, job: JobFacts | None = None) -> None:
    """Move the suite's files to the release and add them to its record; those that are no results are kept apart."""
    if why := _unfit(ended, results):
        _move(results, _incomplete(made))
        raise KitError(why, f"what the suite wrote is in {_incomplete(made)}; earlier results stay")
    section = _section(record, results, made, ended.status, job)
    _move(results, made.functional)
    add_section(made.record, section, replace=True)
    say(f"suite {section.status}: {section.passed} passed, {section.failed} failed, {section.skipped} skipped")


def newest_release() -> str:
    """The name of the release whose squashfs was made last."""
    records = (REPO / "dist").glob("*/record.json")
    made = [file for file in (Release(record.parent.name).sqsh for record in records) if file.exists()]
    if not made:
        raise UsageError("there is no release with a squashfs in dist", "make one: make image sqsh")
    return max(made, key=lambda file: file.stat().st_mtime).parent.name


def count_results(junit: Path) -> Counts:
    """What a JUnit XML file counts, over all its suites."""
    try:
        cases = list(ElementTree.parse(junit).iter("testcase"))
    except ElementTree.ParseError as error:
        raise KitError(f"{junit} is no JUnit XML ({error})", "see the suite's log beside it") from None
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Counts(len(cases) - failed - skipped, failed, skipped)


def checked_release(made: Release) -> Record:
    """The record, once the squashfs is seen to be the one it names."""
    check_squashfs(made.sqsh)
    record = read_record(made.record)
    if record.sqsh is None or record.sqsh.sha256 != sha256_of(made.sqsh):
        raise KitError(
            f"{made.sqsh} is not the squashfs in {made.record}", f"make it again: make sqsh NAME={made.name}"
        )
    return record


def _unpacked(archive: Path, scratch: Path) -> Path:
    try:
        with tarfile.open(archive) as file:
            file.extractall(scratch, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise KitError(f"{archive} is no whole archive ({error})", "bring it again") from None
    return scratch


def _container(
    made: Release,
    results: Path,
    recipe: str | None,
    words: Sequence[str],
    mounts: Sequence[Mount],
    env: Mapping[str, str],
) -> Container:
    return Container(
        squashfs=made.sqsh,
        command=[*COMMAND, *words],
        mounts=[*mounts, {"source": str(results), "target": RESULTS, "read_only": False}],
        env={**env, "FUNCTIONAL_OUT": RESULTS, **({"RECIPE": recipe} if recipe else {})},
        host_network=False,
        terminal=False,
        stop_within_s=STOP_WITHIN_S,
    )


def _unfit(ended: Ended, results: Path) -> str | None:
    """Why these are no results to record, if they are none."""
    report, junit = results / "report.json", results / "junit.xml"
    if ended.interrupted:
        return "the suite was interrupted"
    if not (report.is_file() and junit.is_file()):
        return f"the suite ended with status {ended.status} before its report"
    try:
        read_report(report)
    except KitError as error:
        return error.what
    return None


def _section(
    record: Record, results: Path, made: Release, status: int, job: JobFacts | None = None
) -> FunctionalSection:
    assert record.sqsh is not None
    counts = count_results(results / "junit.xml")
    outcome: Literal["passed", "failed", "error"] = "passed" if status == 0 else "failed" if status == 1 else "error"
    return FunctionalSection(
        path=f"{made.functional.name}/report.json",
        sha256=sha256_of(results / "report.json"),
        status=outcome,
        image_digest=record.sqsh.source_digest,
        sqsh_sha256=record.sqsh.sha256,
        passed=counts.passed,
        failed=counts.failed,
        skipped=counts.skipped,
        pages={name: sha256_of(results / name) for name in PAGES if (results / name).is_file()},
        job=job,
    )


def _incomplete(made: Release) -> Path:
    return made.functional.with_name(f"{made.functional.name}.incomplete")


def _move(results: Path, place: Path) -> None:
    """Put the folder where an earlier one may lie; there is no moment at which a half one does."""
    earlier = place.with_name(f".{place.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if place.exists():
        place.rename(earlier)
    results.chmod(0o755)
    results.rename(place)
    shutil.rmtree(earlier, ignore_errors=True)

"""Hold every section of a release's record against the artifact it speaks of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, RootModel

from kit.command import run
from kit.errors import CHECK_FAILED, KitError
from kit.files import sha256_of
from kit.layout import Release, release
from kit.oci import check_layout, registry_digest
from kit.record import FunctionalSection, ImageSection, PushSection, Record, SqshSection, read_record
from kit.sqsh import IMAGE_JSON
from kit.steps import say


class Finding(BaseModel):
    """What one comparison found; `detail` says how the two differ, or why they could not be compared."""

    model_config = ConfigDict(frozen=True)

    section: str
    what: str
    result: Literal["ok", "failed", "unknown"]
    detail: str = ""


class Findings(RootModel[list[Finding]]):
    pass


def verify_release(name: str) -> Findings:
    """One finding a comparison, in the order of the road; nothing is changed."""
    made = release(name)
    record = read_record(made.record)
    findings = list(_image(made, record.image))
    if record.push is not None:
        findings += _push(record.image, record.push)
    if record.sqsh is not None:
        findings += _sqsh(made, record.image, record.sqsh)
    if record.functional is not None:
        findings += _functional(made, record, record.functional)
    return Findings(findings)


def report_findings(findings: Findings) -> int:
    """Say each finding in a line; the answer is the exit status."""
    for finding in findings.root:
        mark = {"ok": "✓", "failed": "✗", "unknown": "?"}[finding.result]
        say(f"{mark} {finding.section}: {finding.what}{f' ({finding.detail})' if finding.detail else ''}")
    return CHECK_FAILED if any(finding.result == "failed" for finding in findings.root) else 0


def _image(made: Release, section: ImageSection) -> Iterator[Finding]:
    try:
        found = check_layout(made.oci)
    except KitError as error:
        yield Finding(section="image", what="layout", result="failed", detail=str(error))
        return
    yield _same("image", "digest of oci/, over every blob", section.digest, found)


def _push(image: ImageSection, section: PushSection) -> Iterator[Finding]:
    yield _same("push", "digest in the record", image.digest, section.digest)
    what = f"digest that {section.reference} has"
    try:
        found = registry_digest(section.reference)
    except KitError as error:
        yield Finding(section="push", what=what, result="unknown", detail=str(error))
        return
    yield _same("push", what, section.digest, found)


def _sqsh(made: Release, image: ImageSection, section: SqshSection) -> Iterator[Finding]:
    path = made.folder / section.path
    yield _same("sqsh", "digest it was made from", image.digest, section.source_digest)
    if not path.is_file():
        yield Finding(section="sqsh", what="file", result="failed", detail=f"{path} is missing")
        return
    yield _same("sqsh", "sha256 of the file", section.sha256, sha256_of(path))
    finished = run(["unsquashfs", "-cat", path, IMAGE_JSON], check=False)
    try:
        inside = json.loads(finished.stdout)["digest"]
    except (ValueError, TypeError, KeyError):
        yield Finding(section="sqsh", what="digest inside", result="failed", detail=f"/{IMAGE_JSON} cannot be read")
        return
    yield _same("sqsh", "digest inside", section.source_digest, str(inside))


def _functional(made: Release, record: Record, section: FunctionalSection) -> Iterator[Finding]:
    yield _same("functional", "image it proved", record.image.digest, section.image_digest)
    yield _same("functional", "squashfs it ran in", record.sqsh.sha256 if record.sqsh else "none", section.sqsh_sha256)
    path = made.folder / section.path
    if not path.is_file():
        yield Finding(section="functional", what="report", result="failed", detail=f"{path} is missing")
        return
    yield _same("functional", "sha256 of the report", section.sha256, sha256_of(path))
    yield _same("functional", "image the report names", section.image_digest, _image_named_in(path))


def _image_named_in(report: Path) -> str:
    """The digest that the suite read from inside the squashfs it ran in."""
    try:
        return str(json.loads(report.read_bytes())["release"]["image"]["digest"])
    except (ValueError, TypeError, KeyError):
        return "none"


def _same(section: str, what: str, wanted: str, found: str) -> Finding:
    if wanted == found:
        return Finding(section=section, what=what, result="ok")
    return Finding(section=section, what=what, result="failed", detail=f"recorded {wanted}, found {found}")

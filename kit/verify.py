"""Hold every section of a release's record against the artifact it speaks of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, RootModel

from kit.build_json import BUILD_JSON, build_json
from kit.command import run
from kit.errors import CHECK_FAILED, KitError
from kit.files import sha256_of
from kit.layout import LOCKFILES, REPO, Release, release
from kit.oci import check_layout, image_size, layout_image, read_manifest, registry_digest
from kit.record import FunctionalSection, ImageSection, PushSection, Record, SqshSection, read_record
from kit.report import read_report
from kit.sources import lock_hashes, source_hashes
from kit.sqsh import IMAGE_JSON
from kit.steps import say
from sqsh.errors import SqshError


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
    recorded = {"media_type": section.media_type, "size": str(section.size), "layers": " ".join(section.layers)}
    yield _same_values("image", "what the manifest says", recorded, _in_manifest(made.oci))
    yield _same_values("image", f"inputs in the image's /{BUILD_JSON}", section.inputs, _inputs_in(made.oci))
    yield _as_checked_out(section)


def _in_manifest(layout: Path) -> dict[str, str]:
    """What there is to compare of a layout whose blobs are whole."""
    image = layout_image(layout)
    manifest = read_manifest(layout, image.digest)
    return {
        "media_type": image.media_type,
        "size": str(image_size(image, manifest)),
        "layers": " ".join(layer.digest for layer in manifest.layers),
    }


def _inputs_in(layout: Path) -> object:
    """What the image itself says it was made of, or nothing where it does not say."""
    try:
        return build_json(layout)["inputs"]
    except (SqshError, ValueError, TypeError, KeyError):
        return None


def _as_checked_out(section: ImageSection) -> Finding:
    """An image of an earlier commit is none the worse for it, so that other sources here are told and no failure."""
    what = "sources and locks of this checkout"
    try:
        locks = [name for name in section.inputs if (LOCKFILES / f"{name}.txt").exists()]
        here = {**lock_hashes(REPO, locks), **source_hashes(REPO)}
    except FileNotFoundError as error:
        return Finding(section="image", what=what, result="unknown", detail=f"{error.filename} is missing")
    others = sorted(name for name in here if section.inputs.get(name) != here[name])
    if not others:
        return Finding(section="image", what=what, result="ok")
    detail = f"the image was made of another state of {', '.join(others)}"
    return Finding(section="image", what=what, result="unknown", detail=detail)


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
    yield _same("sqsh", "bytes of the file", str(section.size), str(path.stat().st_size))
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
    for name, sha256 in section.pages.items():
        page = path.with_name(name)
        yield _same("functional", f"sha256 of {name}", sha256, sha256_of(page) if page.is_file() else "none")
    try:
        report = read_report(path)
    except KitError as error:
        yield Finding(section="functional", what="report", result="failed", detail=str(error))
        return
    yield _same("functional", "image the report names", section.image_digest, report.image_digest or "none")
    yield _same_values("functional", "inputs the report names", record.image.inputs, report.inputs)
    counted = f"{section.passed} passed, {section.failed} failed"
    yield _same("functional", "checks in the report", counted, f"{report.passed} passed, {report.failed} failed")
    recorded, found = section.status == "passed", report.passed > 0 and report.failed == 0
    words = {True: "passed", False: "not passed"}
    yield _same("functional", "outcome of the report", words[recorded], words[found])


def _same_values(section: str, what: str, wanted: Mapping[str, str], found: object) -> Finding:
    """Equal values under equal names; the detail names each that is not."""
    if not isinstance(found, dict) or not found:
        return Finding(section=section, what=what, result="failed", detail="there are none")
    others = [
        f"{name}: recorded {wanted.get(name, 'none')}, found {found.get(name, 'none')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    return Finding(section=section, what=what, result="failed" if others else "ok", detail="; ".join(others))


def _same(section: str, what: str, wanted: str, found: str) -> Finding:
    if wanted == found:
        return Finding(section=section, what=what, result="ok")
    return Finding(section=section, what=what, result="failed", detail=f"recorded {wanted}, found {found}")

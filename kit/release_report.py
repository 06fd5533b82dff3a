"""`./build.py report`: what a release is, how large, how long each part took, and how its nights went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kit.errors import KitError
from kit.layout import REPO, Release, release
from kit.nights import Night, read_nights, suite_seconds
from kit.oci import layout_image, read_manifest
from kit.record import Record, read_record
from kit.steps import seconds_text, size_text

State = Literal["yes", "no", "missing"]
HISTORY = REPO / "dist/nightly/history.jsonl"
EARLIER = "earlier"


@dataclass(frozen=True)
class Link:
    """A link of the chain, and whether the record ties it to the one before. The artifacts are `verify`'s."""

    name: str
    value: str
    holds: State
    why: str


@dataclass(frozen=True)
class Layer:
    digest: str
    size: int | None  # none where oci/ is not here


@dataclass(frozen=True)
class ReleaseReport:
    """Sizes in bytes, times in seconds."""

    name: str
    profile: str
    made: str
    chain: list[Link]
    layers: list[Layer]
    image_size: int
    sqsh_size: int | None
    seconds: dict[str, float]
    nights: list[Night]
    earlier: list[tuple[str, str, int]]
    status: str
    page: str | None

    def as_json(self) -> str:
        plain = asdict(self)
        plain["nights"] = [night.model_dump() for night in self.nights]
        return json.dumps(plain, indent=2)


def report_release(name: str, history: Path | None = None) -> ReleaseReport:
    """Raises KitError where there is no record."""
    made = release(name)
    record = read_record(made.record)
    suite = _suite(made)
    page = made.functional / "report.html"
    nights = [one for one in read_nights(history or HISTORY) if one.about.get("name") == name]
    return ReleaseReport(
        name=name,
        profile=record.image.profile,
        made=record.image.time.isoformat(),
        chain=_chain(record),
        layers=_layers(made, record),
        image_size=record.image.size,
        sqsh_size=record.sqsh.size if record.sqsh else None,
        seconds={**(nights[-1].seconds if nights else {}), **_job_seconds(record), **suite_seconds(suite)},
        nights=nights,
        earlier=_earlier(made),
        status=record.functional.status if record.functional else "not run",
        page=f"{made.functional.name}/{page.name}" if page.is_file() else None,
    )


def say_report(report: ReleaseReport, page: Path) -> None:
    """Print it for people; stdout, since it is the answer."""
    print(f"release {report.name}, profile {report.profile}, made {report.made}: suite {report.status}")
    for link in report.chain:
        mark = {"yes": "✓", "no": "✗", "missing": "–"}[link.holds]
        print(f"{mark} {link.name}: {link.value} ({link.why})")
    print(f"image {size_text(report.image_size)} in {len(report.layers)} layers")
    for layer in report.layers:
        print(f"    {layer.digest} {'not here' if layer.size is None else size_text(layer.size)}")
    if report.sqsh_size is not None:
        print(f"squashfs {size_text(report.sqsh_size)}")
    for name, seconds in report.seconds.items():
        print(f"    {name}: {seconds_text(seconds)}")
    for night in report.nights[-10:]:
        print(f"night {night.time} {night.commit[:12]}: {night.status}")
    print(f"page: {page}")


def _chain(record: Record) -> list[Link]:
    image, push, sqsh, suite = record.image, record.push, record.sqsh, record.functional
    commit = image.commit or "not recorded"
    told: State = "missing" if image.commit is None else "no" if commit.endswith("-dirty") else "yes"
    links = [
        Link("commit", commit, told, f"{len(image.inputs)} inputs by sha256 in record.json"),
        Link("image", image.digest, "yes", f"{len(image.layers)} layers"),
    ]
    missing = Link("", "none", "missing", "not done yet")
    if push is None:
        links.append(Link("push", missing.value, missing.holds, missing.why))
    else:
        links.append(Link("push", push.reference, _same(push.digest, image.digest), "its digest against the image's"))
    if sqsh is None:
        links.append(Link("squashfs", missing.value, missing.holds, missing.why))
    else:
        links.append(Link("squashfs", sqsh.sha256, _same(sqsh.source_digest, image.digest), "the image it came from"))
    if suite is None:
        links.append(Link("run", missing.value, missing.holds, missing.why))
        return links
    told = _same(suite.sqsh_sha256, sqsh.sha256 if sqsh else "")
    counted = f"{suite.status}, {suite.passed} passed, {suite.failed} failed"
    where = f", as Slurm job {suite.job.id} on {suite.job.nodes} by {suite.job.backend}" if suite.job else ""
    links.append(Link("run", counted, told, f"the squashfs it ran in{where}"))
    return links


def _job_seconds(record: Record) -> dict[str, float]:
    """Of a suite that ran as a job: from submission to each phase."""
    job = record.functional.job if record.functional else None
    return {f"job until: {phase}": seconds for phase, seconds in job.seconds.items()} if job else {}


def _same(one: str, other: str) -> State:
    return "yes" if one == other else "no"


def _layers(made: Release, record: Record) -> list[Layer]:
    try:
        manifest = read_manifest(made.oci, layout_image(made.oci).digest)
        sizes: dict[str, int] = {layer.digest: layer.size for layer in manifest.layers}
    except (KitError, OSError):
        sizes = {}
    return [Layer(digest, sizes.get(digest)) for digest in record.image.layers]


def _suite(made: Release) -> dict[str, Any]:
    try:
        content = json.loads((made.functional / "report.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _earlier(made: Release) -> list[tuple[str, str, int]]:
    """When, digest and size of the images that had this name before, oldest first."""
    records: Sequence[Path] = sorted((made.folder / EARLIER).glob("*.json"))
    images = [read_record(path).image for path in records]
    return sorted((image.time.isoformat(), image.digest, image.size) for image in images)

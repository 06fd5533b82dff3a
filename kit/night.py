"""Close a night of ci/nightly.sh: keep its timings, and tell what is slower than the nights before."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from kit.errors import KitError
from kit.files import write_atomic
from kit.layout import release
from kit.nights import Night, keep_night, read_nights, regressions, suite_seconds
from kit.record import now, read_record
from kit.release_facts import checked_out_commit
from kit.steps import say

STAGES = "stages.tsv"
LEFT_OUT = 3
"""Status of a stage that found nothing to do."""


class Closed(BaseModel):
    """What a night came to."""

    night: Night
    earlier: int
    left_out: list[str]
    regressed: list[str]


def close_night(name: str, folder: Path, history: Path, failed: bool) -> Closed:
    """Write `timings.json` into the night's folder and append to the history. Raises KitError without its stages."""
    stages = _stages(folder / STAGES)
    suite = _suite(folder / "report.json")
    seconds = {f"stage: {stage}": took for stage, (took, status) in stages.items() if status == 0}
    record = read_record(release(name).record) if release(name).record.exists() else None
    about = {"name": name, "profile": record.image.profile if record else "", **_machine(suite)}
    night = Night(
        time=now().isoformat(),
        commit=checked_out_commit() or "unknown",
        about=about,
        status="failed" if failed else "passed",
        seconds={**seconds, **suite_seconds(suite)},
    )
    earlier = read_nights(history)
    slower = [] if failed else regressions(night, earlier)
    if slower:
        night = night.model_copy(update={"status": "regressed"})
    closed = Closed(
        night=night,
        earlier=sum(one.about == night.about for one in earlier),
        left_out=[stage for stage, (_, status) in stages.items() if status == LEFT_OUT],
        regressed=[str(one) for one in slower],
    )
    write_atomic(folder / "timings.json", closed.model_dump_json(indent=2) + "\n")
    keep_night(history, night)
    return closed


def say_closed(closed: Closed) -> int:
    """One line a time; exit status 1 where one regressed."""
    for name, value in closed.night.seconds.items():
        say(f"{name}: {value:.2f} s")
    for stage in closed.left_out:
        say(f"{stage}: left out")
    for text in closed.regressed:
        say(f"✗ slower than {closed.earlier} earlier nights make likely: {text}")
    return int(bool(closed.regressed))


def _stages(path: Path) -> dict[str, tuple[float, int]]:
    """Stage → seconds and exit status."""
    try:
        rows = [line.split("\t") for line in path.read_text().splitlines()]
        return {stage: (float(seconds), int(status)) for stage, seconds, status in rows}
    except (OSError, ValueError) as error:
        raise KitError(f"{path} holds no stages of a night ({error})", "it is written by ci/nightly.sh") from None


def _suite(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _machine(suite: dict[str, object]) -> dict[str, str]:
    """What the suite saw of it: times of different machines are not compared."""
    hardware = suite.get("hardware")
    if not isinstance(hardware, dict):
        return {}
    gpus = hardware.get("gpus")
    names = ", ".join(map(str, gpus)) if isinstance(gpus, list) else ""
    return {"processor": str(hardware.get("processor")), "cores": str(hardware.get("cores")), "gpus": names}

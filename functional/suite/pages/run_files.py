"""What a run left beside report.json, read as far as it is there and whole."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from functional.runtime.jsonlines import read_json_lines

LISTED = ("*.json", "*.jsonl", "*.xml", "*.svg", "routers.md", "logs/*")


@dataclass(frozen=True)
class RunFiles:
    """Rows of the JSON Lines files, none of one that is absent or broken; `broken`: file → why."""

    out: Path
    events: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    usage: list[dict[str, Any]]
    agreement: list[dict[str, Any]]
    broken: dict[str, str]

    @classmethod
    def read(cls, out: Path) -> "RunFiles":
        broken: dict[str, str] = {}

        def rows(name: str) -> list[dict[str, Any]]:
            path = out / name
            try:
                return read_json_lines(path) if path.is_file() else []
            except (ValueError, OSError) as error:
                broken[name] = str(error)
                return []

        requests = [row for path in sorted(out.glob("requests*.jsonl")) for row in rows(path.name)]
        names = ("events", "rollouts", "metrics", "usage", "agreement")
        found = {name: rows(f"{name}.jsonl") for name in names}
        return cls(out=out, requests=requests, broken=broken, **found)

    @property
    def began(self) -> float:
        """Seconds since the epoch of the run's first event; 0 where there is none."""
        return float(self.events[0]["time"]) if self.events else 0.0

    def event(self, name: str, after: float = 0.0) -> float | None:
        """When an event was first noted after a time; None if never."""
        return next((time for time in self._times.get(name, ()) if time >= after), None)

    @cached_property
    def _times(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for row in self.events:
            found.setdefault(row["event"], []).append(float(row["time"]))
        return found

    def listed(self) -> list[tuple[str, int]]:
        """Name relative to the folder, and bytes, of every file a reader may want."""
        found = {path for pattern in LISTED for path in self.out.glob(pattern) if path.is_file()}
        return [(str(path.relative_to(self.out)), path.stat().st_size) for path in sorted(found)]


def served_by_step(rollouts: Iterable[dict[str, Any]]) -> dict[int, Counter[int]]:
    """Step → samples by the instance that made them."""
    found: dict[int, Counter[int]] = {}
    for row in rollouts:
        if row.get("instance_id") is not None:
            found.setdefault(row["step"], Counter())[row["instance_id"]] += 1
    return found

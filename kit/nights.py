"""Timings of nightly runs: kept night by night, and held against the nights before.

A time counts as regressed when it lies above the interval in which one more night like the earlier ones would be: of
their logarithms, since times are skewed and what matters is a factor. With several times a night, the level is divided
by their number, so that a night of no change raises an alarm in about LEVEL of all cases.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kit.errors import KitError
from kit.files import write_atomic

LEVEL = 0.01
FEWEST = 6
"""Earlier nights that it takes to tell noise from a regression."""
WINDOW = 30
"""The last nights that count: machines and inputs drift."""
SPREAD_FLOOR = 0.01
"""Least spread assumed, as a factor: what the clock and the scheduler alone do to a time of some seconds."""
SHORTEST_S = 0.5
"""Shorter times are kept, but raise no alarm."""


class Night(BaseModel):
    """One night. `seconds`: by name; `about`: what times can be compared over (profile, machine)."""

    model_config = ConfigDict(extra="forbid")

    time: str
    commit: str
    about: dict[str, str]
    status: str = Field(description="passed or failed")
    seconds: dict[str, float]


@dataclass(frozen=True)
class Regression:
    """A time above what the nights before make likely."""

    name: str
    seconds: float
    usual: float
    bound: float

    def __str__(self) -> str:
        factor = self.seconds / self.usual
        return (
            f"{self.name}: {self.seconds:.2f} s, usually {self.usual:.2f} s ({factor:.2f}×, at most {self.bound:.2f} s)"
        )


def read_nights(history: Path) -> list[Night]:
    """Oldest first; none where there is no file. Raises KitError for a line that is no night."""
    if not history.exists():
        return []
    nights = []
    for number, line in enumerate(history.read_text().splitlines(), 1):
        try:
            nights.append(Night.model_validate_json(line))
        except ValidationError as error:
            raise KitError(f"{history}:{number} is no night ({error.errors()[0]['msg']})", "remove the line") from None
    return nights


def keep_night(history: Path, night: Night) -> None:
    """Append it; the file is whole at any moment."""
    history.parent.mkdir(parents=True, exist_ok=True)
    before = history.read_text() if history.exists() else ""
    write_atomic(history, f"{before}{night.model_dump_json()}\n")


def regressions(night: Night, earlier: Sequence[Night]) -> list[Regression]:
    """Times of `night` above those of the earlier nights that passed on an equal machine."""
    alike = [one for one in earlier if one.about == night.about and one.status == "passed"][-WINDOW:]
    judged = {name: [one.seconds[name] for one in alike if name in one.seconds] for name in night.seconds}
    judged = {name: values for name, values in judged.items() if len(values) >= FEWEST}
    level = LEVEL / max(len(judged), 1)
    found = []
    for name, values in judged.items():
        bound = upper_bound(values, level)
        if night.seconds[name] > max(bound, SHORTEST_S):
            found.append(Regression(name, night.seconds[name], statistics.median(values), bound))
    return found


def upper_bound(values: Sequence[float], level: float) -> float:
    """What one more value like these exceeds with a probability of `level`: a prediction interval of the logarithms."""
    logs = [math.log(max(value, 1e-3)) for value in values]
    spread = max(statistics.stdev(logs), math.log1p(SPREAD_FLOOR))
    width = t_quantile(1 - level, len(logs) - 1) * spread * math.sqrt(1 + 1 / len(logs))
    return float(math.exp(statistics.mean(logs) + width))


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """Of Student's t, by bisection over its density's integral (Simpson's rule)."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)

    def below(value: float) -> float:
        steps = 2000
        width = value / steps
        weights = (1 if index in (0, steps) else 4 if index % 2 else 2 for index in range(steps + 1))
        density = (math.pow(1 + (index * width) ** 2 / degrees, -(degrees + 1) / 2) for index in range(steps + 1))
        return 0.5 + scale * width / 3 * sum(weight * value for weight, value in zip(weights, density, strict=True))

    low, high = 0.0, 1.0
    while below(high) < probability:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return high


def suite_seconds(report: Mapping[str, object]) -> dict[str, float]:
    """The times that a suite's report.json holds: start-up by phase, and the median of its updates after the first."""
    found: dict[str, float] = {}
    phases = report.get("phases")
    if isinstance(phases, dict):
        found |= {f"suite: {name}": float(value) for name, value in phases.items()}
    if isinstance(total := report.get("seconds"), int | float):
        found["suite: total"] = float(total)
    refits = report.get("refits")
    if isinstance(refits, list) and len(refits) > 1:
        found["suite: policy update"] = statistics.median(float(one["total_s"]) for one in refits[1:])
    return found

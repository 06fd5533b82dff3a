"""What the suite demands of a run: each check has a name, an outcome, and the figures behind it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One demand. `detail` says what was seen; `figures` are the numbers it rests on."""

    name: str
    passed: bool
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


class Checklist:
    """Checks of a run, in the order they were made."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def add(self, name: str, passed: bool, detail: str, **figures: Any) -> None:
        """Record one check."""
        self.checks.append(Check(name, bool(passed), detail, figures))

    @property
    def passed(self) -> bool:
        """Whether there is at least one check and none failed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

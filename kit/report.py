"""`report.json` of the functional suite: what the kit reads of it.

The suite publishes the whole of it as functional/suite/report.schema.json; a test holds the fields here against that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from kit.errors import KitError


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class Check(Part):
    name: str
    passed: bool


class Image(Part):
    digest: str | None = None


class Build(Part):
    inputs: dict[str, str] | None = None


class ReleaseFacts(Part):
    """What the image said of itself when the suite ran in it."""

    build: Build | None = None
    image: Image | None = None


class Report(Part):
    schema_version: Literal[1]
    status: Literal["passed", "failed"]
    error: str | None
    release: ReleaseFacts
    checks: list[Check]

    @property
    def image_digest(self) -> str | None:
        return self.release.image.digest if self.release.image else None

    @property
    def inputs(self) -> dict[str, str]:
        """sha256 of what went into the image, by name; empty where it did not say."""
        return (self.release.build.inputs if self.release.build else None) or {}

    @property
    def passed(self) -> int:
        return sum(check.passed for check in self.checks)

    @property
    def failed(self) -> int:
        """Checks that failed; that a run ended early counts as one."""
        return len(self.checks) - self.passed + (self.error is not None)


def read_report(path: Path) -> Report:
    """The report at `path`. Raises KitError, with the reason alone, for a file that is no report or a damaged one: it
    names the first key that is missing or of another kind."""
    try:
        return Report.model_validate(json.loads(path.read_bytes(), parse_constant=_refuse))
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    raise KitError(f"{path.name} is not a report of the suite ({reason})")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")

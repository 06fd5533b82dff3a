"""What lockfiles/bases.toml says about a profile's base."""

from __future__ import annotations

import tomllib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kit.errors import UsageError
from kit.layout import LOCKFILES


class Base(BaseModel):
    """A Debian `suite` made here with `packages`, or a published `image` by its digest that they are added to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str
    glibc: str
    packages: tuple[str, ...]
    suite: str | None = None
    image: Annotated[str | None, Field(pattern=r"@sha256:[0-9a-f]{64}$")] = None
    locks: str | None = None
    """Whose locks the profile takes; its own if none."""


class Bases(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source_date_epoch: int
    cpu: Base
    cuda: Base
    cuda_trixie: Annotated[Base, Field(alias="cuda-trixie")]

    def of(self, profile: str) -> Base:
        base: Base = getattr(self, profile.replace("-", "_"))
        return base


def read_bases() -> Bases:
    path = LOCKFILES / "bases.toml"
    try:
        return Bases.model_validate(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise UsageError(f"{path}: {error}", "correct the file") from error

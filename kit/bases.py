"""What lockfiles/bases.toml says about a profile's base."""

from __future__ import annotations

import tomllib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kit.errors import UsageError
from kit.layout import LOCKFILES


class Base(BaseModel):
    """Either a Debian `suite` with `packages`, made here, or a published `image` pinned by its digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str
    glibc: str
    suite: str | None = None
    packages: tuple[str, ...] = ()
    image: Annotated[str | None, Field(pattern=r"@sha256:[0-9a-f]{64}$")] = None


class Bases(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source_date_epoch: int
    cpu: Base
    cuda: Base

    def of(self, profile: str) -> Base:
        base: Base = getattr(self, profile)
        return base


def read_bases() -> Bases:
    path = LOCKFILES / "bases.toml"
    try:
        return Bases.model_validate(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise UsageError(f"{path}: {error}", "correct the file") from error

"""Models of lockfiles/bases.toml and lockfiles/archives.toml: a profile's base image and the archives it needs."""

from __future__ import annotations

import tomllib
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kit.errors import KitError, UsageError
from kit.layout import LOCKFILES

_Model = TypeVar("_Model")


class Base(BaseModel):
    """A Debian `suite` made here with `packages`, or a published `image` by its digest that they are added to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str
    glibc: str
    packages: tuple[str, ...]
    suite: str | None = None
    image: Annotated[str | None, Field(pattern=r"@sha256:[0-9a-f]{64}$")] = None
    archives: tuple[str, ...] = ()
    """Names in archives.toml; each is used if its host can be reached."""
    locks: str | None = None
    """The profile whose locks this one uses; its own if None."""


class Bases(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source_date_epoch: int
    nemo_rl_packages: tuple[str, ...]
    """What every base has besides for NeMo RL."""
    cpu: Base
    cuda: Base
    cuda_trixie: Annotated[Base, Field(alias="cuda-trixie")]

    def of(self, profile: str) -> Base:
        base: Base = getattr(self, profile.replace("-", "_"))
        return base

    def for_nemo_rl(self, base: Base) -> Base:
        return base.model_copy(update={"packages": tuple(sorted({*base.packages, *self.nemo_rl_packages}))})


class Archive(BaseModel):
    """One archive: its URL, and its sha256 for each machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    url: str
    amd64: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    arm64: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    def for_machine(self, machine: str) -> tuple[str, str]:
        """URL and sha256 for a machine as `uname -m` names it."""
        debian = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine)
        if debian is None:
            raise KitError(f"no archives for {machine}", "build on x86_64 or aarch64")
        return self.url.format(version=self.version, machine=debian), str(getattr(self, debian))


def read_bases() -> Bases:
    return _valid("bases.toml", TypeAdapter(Bases))


def read_archives() -> dict[str, Archive]:
    return _valid("archives.toml", TypeAdapter(dict[str, Archive]))


def _valid(name: str, model: TypeAdapter[_Model]) -> _Model:
    try:
        return model.validate_python(tomllib.loads((LOCKFILES / name).read_text()))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise UsageError(f"{LOCKFILES / name}: {error}", "correct the file") from error

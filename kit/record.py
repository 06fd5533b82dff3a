"""`record.json`: what a release consists of and what was verified about it.

One section per stage. The file is written atomically, and a section that is there is replaced only on request (see
`add_section`). The JSON Schema in record.schema.json is generated from these models.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError

from kit.errors import KitError
from kit.files import write_atomic

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SCHEMA_FILE = Path(__file__).with_name("record.schema.json")


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    time: AwareDatetime = Field(default_factory=now, description="When this section was written (UTC).")


class NemoRl(BaseModel):
    """The tree of NeMo RL in an image, as it was checked before and in the build."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]
    pins: dict[str, Sha256] = Field(description="sha256 of each lock in the tree, which our own lock was made for.")
    patches: dict[str, Sha256] = Field(description="Patches of its own that were applied to the Dynamo environment.")
    size: NonNegativeInt = Field(description="Bytes of it and of its environment that no other environment shares.")


class ImageSection(Section):
    """The OCI layout in `oci/`; its digest is the release's identity."""

    name: str
    profile: str
    digest: Digest
    media_type: str
    size: NonNegativeInt = Field(description="Bytes of the manifest, the configuration and the compressed layers.")
    layers: list[Digest]
    key: Sha256 = Field(description="Hash over everything that went into the build; equal key, equal image.")
    inputs: dict[str, str] = Field(
        description="sha256 of each lockfile, base and source tree that went in; of NeMo RL's tree the commit."
    )
    source_date_epoch: int
    commit: str | None = Field(
        None, description="Of the checkout that was built, `-dirty` with changes; none outside git."
    )
    nemo_rl: NemoRl | None = None


class PushSection(Section):
    reference: str = Field(description="registry/repository:tag")
    digest: Digest

    @property
    def subject(self) -> str:
        return self.digest


class SqshSection(Section):
    path: str = Field(description="Relative to the record's folder.")
    sha256: Sha256
    size: NonNegativeInt
    source_digest: Digest
    options: dict[str, str] = Field(description="Compressor and such: with the digest, they decide the bytes.")
    tools: dict[str, str] = Field(description="Version of each tool that made it.")

    @property
    def subject(self) -> str:
        return self.source_digest


class JobFacts(BaseModel):
    """The Slurm job that the suite ran as."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    nodes: str = Field(description="As Slurm writes them: node[1-2].")
    backend: str = Field(description="What ran the container: pyxis, enroot, oci or runner.")
    seconds: dict[str, NonNegativeFloat] = Field(description="From submission to the start of each phase.")


class FunctionalSection(Section):
    path: str = Field(description="report.json, relative to the record's folder.")
    sha256: Sha256
    status: Literal["passed", "failed", "error"]
    image_digest: Digest
    sqsh_sha256: Sha256
    passed: NonNegativeInt
    failed: NonNegativeInt
    skipped: NonNegativeInt
    pages: dict[str, Sha256] = Field(default_factory=dict, description="Pages for people beside it, by file name.")
    job: JobFacts | None = Field(None, description="None for a run on this machine.")

    @property
    def subject(self) -> str:
        return self.image_digest


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    image: ImageSection
    push: PushSection | None = None
    sqsh: SqshSection | None = None
    functional: FunctionalSection | None = None


def read_record(path: Path) -> Record:
    try:
        return Record.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise KitError(f"no record at {path}", "make the image first: ./build.py image") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise KitError(f"{path} is not a release record ({where}: {first['msg']})", "make the release again") from error


def start_record(path: Path, image: ImageSection) -> Record:
    """Begin the record of a new image.

    The same digest keeps the record and all its sections. Another digest is another release: the earlier record is
    moved to `earlier/` under its digest, because it remains true of that image.
    """
    if path.exists():
        earlier = read_record(path)
        if earlier.image.digest == image.digest:
            # Different sources can give the same bytes; the record then names the latest.
            return _write(path, earlier.model_copy(update={"image": image}))
        kept = path.parent / "earlier" / f"{earlier.image.digest[7:19]}.json"
        kept.parent.mkdir(exist_ok=True)
        path.replace(kept)
    return _write(path, Record(image=image))


def add_section(path: Path, section: PushSection | SqshSection | FunctionalSection, *, replace: bool = False) -> Record:
    """Add one section. Raises KitError where a different one is there, unless the caller has rebuilt the artifact and
    passes `replace`."""
    record = read_record(path)
    key = {PushSection: "push", SqshSection: "sqsh", FunctionalSection: "functional"}[type(section)]
    if section.subject != record.image.digest:
        raise KitError(f"{path} is now of another image than this '{key}' was made from", f"run {key} again")
    there = getattr(record, key)
    if there is not None and not replace and there.model_dump(exclude={"time"}) != section.model_dump(exclude={"time"}):
        raise KitError(f"{path} already has another '{key}' section", "remove the release folder to start it anew")
    return _write(path, record.model_copy(update={key: section}))


def json_schema() -> str:
    return json.dumps(Record.model_json_schema(), indent=2) + "\n"


def _write(path: Path, record: Record) -> Record:
    write_atomic(path, record.model_dump_json(indent=2, exclude_none=True) + "\n")
    return record

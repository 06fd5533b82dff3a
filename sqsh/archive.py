"""Images in an archive that `docker save` or another tool wrote: a tar of layers, or of an OCI layout."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from sqsh.errors import BadImage, SqshError, UsageError
from sqsh.manifest import MAX_JSON, Blob, Image, Source, Store, from_index, parse
from sqsh.names import Named, by_name, which
from sqsh.stream import Limits
from sqsh.unpack import CHUNK_SIZE, is_packed, unpacked

MAX_LINKS = 40  # from member to member


def archive_image(text: str, path: Path, tag: str, platform: str, limits: Limits, note: Callable[[str], None]) -> Image:
    store = ArchiveStore(path, limits, note)
    if store.has("index.json"):
        return from_index(text, store.text("index.json"), store, tag, platform)
    if not store.has("manifest.json"):
        if store.has("repositories"):
            raise UsageError(f"{path} was saved by Docker before 1.10", "load it into a newer one and save it again")
        raise UsageError(f"{path} is no image archive", "it has neither index.json nor manifest.json")
    try:
        saved = [_Saved.model_validate(entry) for entry in json.loads(store.text("manifest.json"))]
    except (ValueError, ValidationError, TypeError):
        raise BadImage(f"manifest.json in {path} cannot be read", "save the image again") from None
    named = [Named([*(entry.tags or []), _id(store.text(entry.config))], entry) for entry in saved]
    found = list({(entry.config, *entry.layers): entry for entry in by_name(text, tag, named)}.values())
    if len(found) > 1:  # an image may be listed once for each of its names
        raise which(text, len(found), named)
    config = store.text(found[0].config)
    diffs = parse(_RootFs, config, found[0].config).rootfs.diff_ids
    if len(diffs) != len(found[0].layers):
        raise BadImage(f"{path} has {len(found[0].layers)} layers, its configuration {len(diffs)}")
    layers = tuple(_saved_layer(store, name, diff) for name, diff in zip(found[0].layers, diffs, strict=True))
    return Image(text, _id(config), "application/vnd.docker.container.image.v1+json", config, layers)


def _id(config: bytes) -> str:
    """An image's ID, by which Docker knows those without a name too."""
    return f"sha256:{hashlib.sha256(config).hexdigest()}"


def _saved_layer(store: ArchiveStore, name: str, diff: str) -> Blob:
    """A layer of an archive: what is known of it is the digest of its tar, whether that is packed there or not."""
    member = store.member(name)
    return Blob(diff, member.size, lambda stopped: store.member(name), of_tar=True)


class ArchiveStore(Store):
    """Members of a tar file that is not unpacked, by name."""

    def __init__(self, path: Path, limits: Limits, note: Callable[[str], None]) -> None:
        self._path = path
        try:
            self._file = _plain(path, limits, note)
            self._members = _members(self._file)
        except (tarfile.TarError, OSError) as error:
            raise UsageError(f"{path} is no image archive ({error})", "name one that `docker save` wrote") from None

    def open(self, digest: str, size: int, stopped: threading.Event | None = None) -> Source:
        return self.member(digest.replace("sha256:", "blobs/sha256/", 1))

    def has(self, name: str) -> bool:
        return name in self._members

    def member(self, name: str) -> _Member:
        """A layer that comes twice may be saved once, and linked to in one way or another."""
        for _ in range(MAX_LINKS):
            member = self._members.get(_plain_name(name))
            if member is not None and member.isreg() and not member.issparse():
                return _Member(self._file, member.offset_data, member.size)
            if member is None or not (member.islnk() or member.issym()):
                break
            folder = os.path.dirname(name) if member.issym() else ""  # noqa: PTH120 (a name, no file)
            name = member.linkname if member.linkname.startswith("/") else f"{folder}/{member.linkname}"
        raise BadImage(f"{self._path} has no {name}", "the archive is not whole")

    def text(self, name: str) -> bytes:
        member = self.member(name)
        if member.size > MAX_JSON:
            raise BadImage(f"{name} in {self._path} has {member.size} bytes", "the archive is damaged")
        try:
            return member.read(member.size)
        finally:
            member.close()


class _Member:
    """Reads a part of the archive, whoever else reads elsewhere in it."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self.size = size
        self._file = file
        self._at = start
        self._end = start + size

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._file.fileno(), min(size, self._end - self._at), self._at)
        self._at += len(data)
        return data

    def close(self) -> None:
        self._at = self._end


def _plain(path: Path, limits: Limits, note: Callable[[str], None]) -> IO[bytes]:
    """The archive's tar: the file itself, or a nameless one with what it unpacks to."""
    packed = path.open("rb", buffering=0)
    head = packed.read(CHUNK_SIZE)
    if not is_packed(head):
        packed.seek(0)
        return packed
    folder = os.environ.get("TMPDIR") or "/var/tmp"
    note(
        f"note: {path} is compressed as a whole: it is unpacked into {folder} first; its plain tar needs no such space"
    )
    plain = _temporary(folder)
    total = 0
    with packed:
        for chunk in unpacked(packed, head, str(path)):
            total += len(chunk)
            limits.refuse_bomb(total, packed.tell(), str(path))
            try:
                plain.write(chunk)
            except OSError as error:
                what = f"{path} could not be unpacked into {folder} ({error.strerror})"
                raise SqshError(what, "name a larger folder by TMPDIR, or convert its plain tar") from None
    plain.seek(0)
    return plain


def _temporary(folder: str) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise SqshError(f"cannot write to {folder} ({error.strerror})", "name another folder by TMPDIR") from None


def _members(file: IO[bytes]) -> dict[str, tarfile.TarInfo]:
    """By name. A tar whose end is cut behind its last member's content lacks nothing."""
    found: dict[str, tarfile.TarInfo] = {}
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                found[_plain_name(member.name)] = member
                end = member.offset_data + (member.size if member.isreg() else 0)
    except tarfile.ReadError:
        if not found or end > os.fstat(file.fileno()).st_size:
            raise
    return found


def _plain_name(name: str) -> str:
    return os.path.normpath(f"/{name}").lstrip("/")


class _Saved(BaseModel):
    """One image in the manifest.json of a `docker save` archive."""

    config: str = Field(alias="Config")
    tags: list[str] | None = Field(default=None, alias="RepoTags")
    layers: Annotated[list[str], BeforeValidator(lambda value: value or [])] = Field(alias="Layers", max_length=4096)


class _RootFs(BaseModel):
    class Layers(BaseModel):
        diff_ids: Annotated[list[str], BeforeValidator(lambda value: value or [])] = []

    rootfs: Layers

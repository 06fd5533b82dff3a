"""Images in an archive that `docker save` or another tool wrote: a tar of layers, or of an OCI layout."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import threading
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from sqsh.errors import BadImage, UsageError
from sqsh.manifest import MAX_JSON, Blob, Image, Source, Store, from_index, parse


def archive_image(text: str, path: Path, tag: str, platform: str) -> Image:
    store = ArchiveStore(path)
    if store.has("index.json"):
        return from_index(text, store.text("index.json"), store, tag, platform)
    if not store.has("manifest.json"):
        raise UsageError(f"{path} is no image archive", "it has neither index.json nor manifest.json")
    try:
        saved = [_Saved.model_validate(entry) for entry in json.loads(store.text("manifest.json"))]
    except (ValueError, ValidationError, TypeError):
        raise BadImage(f"manifest.json in {path} cannot be read", "save the image again") from None
    if tag:
        saved = [entry for entry in saved if any(f"/{name}".endswith(f"/{tag}") for name in entry.tags or [])]
    if len(saved) != 1:
        raise UsageError(f"{text} names {len(saved)} images", "name one: ARCHIVE:REPOSITORY:TAG")
    config = store.text(saved[0].config)
    diffs = parse(_RootFs, config, saved[0].config).rootfs.diff_ids
    if len(diffs) != len(saved[0].layers):
        raise BadImage(f"{path} has {len(saved[0].layers)} layers, its configuration {len(diffs)}")
    layers = tuple(_saved_layer(store, name, diff) for name, diff in zip(saved[0].layers, diffs, strict=True))
    digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    return Image(text, digest, "application/vnd.docker.container.image.v1+json", config, layers)


def _saved_layer(store: ArchiveStore, name: str, diff: str) -> Blob:
    """A layer of an archive: its digest is that of the uncompressed tar, which is how it is saved."""
    member = store.member(name)
    member.close()
    return Blob(diff, member.size, lambda stopped: store.member(name))


class ArchiveStore(Store):
    """Members of a tar file that is not unpacked, by name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, tarfile.TarInfo] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    self._members[os.path.normpath(member.name)] = member
        except (tarfile.TarError, OSError) as error:
            raise UsageError(f"{path} is no image archive ({error})", "name one that `docker save` wrote") from None

    def open(self, digest: str, size: int, stopped: threading.Event | None = None) -> Source:
        return self.member(digest.replace("sha256:", "blobs/sha256/", 1))

    def has(self, name: str) -> bool:
        return name in self._members

    def member(self, name: str) -> _Member:
        for _ in range(3):
            member = self._members.get(os.path.normpath(name))
            if member is None:
                break
            if member.isreg():
                return _Member(self._path, member.offset_data, member.size)
            name = os.path.join(os.path.dirname(name), member.linkname)  # noqa: PTH118,PTH120 (names, not files)
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
    def __init__(self, path: Path, start: int, size: int) -> None:
        self.size = size
        self._file = path.open("rb", buffering=0)
        self._file.seek(start)
        self._left = size

    def read(self, size: int, /) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()


class _Saved(BaseModel):
    """One image in the manifest.json of a `docker save` archive."""

    config: str = Field(alias="Config")
    tags: list[str] | None = Field(default=None, alias="RepoTags")
    layers: list[str] = Field(alias="Layers", max_length=4096)


class _RootFs(BaseModel):
    class Layers(BaseModel):
        diff_ids: list[str] = []

    rootfs: Layers

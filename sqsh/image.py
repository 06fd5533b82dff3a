"""Which image is meant, and where its blobs are: an OCI layout, a `docker save` archive, or a registry."""

from __future__ import annotations

import hashlib
import json
import os
import platform as machine
import re
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sqsh.errors import BadImage, UsageError
from sqsh.reference import DIGEST
from sqsh.stream import Blob, Source

MAX_JSON = 16 << 20
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
LAYERS = re.compile(
    r"application/vnd\.(oci\.image\.layer(\.nondistributable)?\.v1\.tar|docker\.image\.rootfs(\.foreign)?\.diff\.tar)"
    r"([+.](gzip|zstd))?"
)
REF_NAME = "org.opencontainers.image.ref.name"
T = TypeVar("T", bound=BaseModel)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}


@dataclass(frozen=True)
class Image:
    """One image: `digest` is its manifest's, or for an archive without one its configuration's (the image ID)."""

    text: str
    digest: str
    media_type: str
    config: bytes
    layers: tuple[Blob, ...]  # the lowest first

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)


class Store:
    """Opens blobs by digest. `size` is what a manifest states; `stopped` ends whatever reading them may wait for."""

    def open(self, digest: str, size: int, stopped: threading.Event | None = None) -> Source:
        raise NotImplementedError

    def read(self, digest: str, size: int) -> bytes:
        """A small blob, checked."""
        if size > MAX_JSON:
            raise BadImage(f"{digest} should be a small file, but has {size} bytes")
        source = self.open(digest, size)
        try:
            parts: list[bytes] = []
            while part := source.read(1 << 20):
                parts.append(part)
                if sum(map(len, parts)) > size:
                    break
        finally:
            source.close()
        data = b"".join(parts)
        if len(data) != size or f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise BadImage(f"{digest} has other content than its digest says", "fetch or build it again")
        return data


def find_image(text: str, platform: str = "", note: Callable[[str], None] = lambda text: None) -> Image:
    """The image that `text` names: a layout's folder, an archive, `DIR:TAG` of either, or a registry's reference.

    With a `platform`, such as linux/arm64, an index's image for it; any other image must say that it is for it.
    `note` is told what there is to wait for.
    """
    if platform and len(platform.split("/")) not in (2, 3):
        raise UsageError(f"'{platform}' is no platform", "write os/architecture, such as linux/amd64")
    image = _find(text, platform, note)
    if platform:
        _refuse_another(image, platform.split("/"))
    return image


def _find(text: str, platform: str, note: Callable[[str], None]) -> Image:
    place, tag = _place(text)
    if place is None:
        if text.startswith((".", "/")) or "/./" in text:
            raise UsageError(f"no OCI layout at {text}", "name its folder, an archive, or registry/repository@sha256:…")
        from sqsh.registry import registry_image

        return registry_image(text, platform, note)
    if place.is_dir():
        return _from_index(text, _read_index(place / "index.json"), LayoutStore(place), tag, platform)
    return _archive_image(text, place, tag, platform)


def _refuse_another(image: Image, wanted: list[str]) -> None:
    """A variant counts only where the image states one: many that have one do not."""
    config = _parse(Descriptor.Platform, image.config, f"the configuration of {image.text}")
    stated = [word for word in (config.os, config.architecture, config.variant) if word]
    if stated[:2] != wanted[:2] or (len(stated) == len(wanted) == 3 and stated != wanted):
        there = "/".join(stated) or "no stated platform"
        raise UsageError(f"{image.text} is an image for {there}, not for {'/'.join(wanted)}")


def _place(text: str) -> tuple[Path | None, str]:
    plain = re.sub(r"^(oci|docker-archive|oci-archive):(?=[^/]|/[^/])", "", text)
    if Path(plain).exists():
        return Path(plain), ""
    for colon in re.finditer(":(?!//)", plain):
        place = Path(plain[: colon.start()])
        if place.is_file() or (place / "index.json").exists():
            return place, plain[colon.end() :]
    return None, ""


class Descriptor(BaseModel):
    model_config = ConfigDict(frozen=True)

    class Platform(BaseModel):
        os: str = ""
        architecture: str = ""
        variant: str = ""

    digest: str = Field(pattern=f"^{DIGEST}$")
    size: int = Field(ge=0)
    media_type: str = Field(default="", alias="mediaType")
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class _Index(BaseModel):
    manifests: list[Descriptor]


class _Manifest(BaseModel):
    media_type: str = Field(default="", alias="mediaType")
    config: Descriptor
    layers: list[Descriptor] = Field(max_length=4096)


def from_descriptor(text: str, found: Descriptor, raw: bytes, store: Store, platform: str) -> Image:
    """The image behind a manifest or an index whose bytes are `raw`."""
    if found.media_type in INDEXES or (found.media_type not in MANIFESTS and b'"manifests"' in raw):
        chosen = _choose(_parse(_Index, raw, found.digest).manifests, platform, text)
        return from_descriptor(text, chosen, store.read(chosen.digest, chosen.size), store, platform)
    manifest = _parse(_Manifest, raw, found.digest)
    for layer in manifest.layers:
        if layer.media_type and not LAYERS.fullmatch(layer.media_type):
            raise BadImage(f"{text} has a layer of the type {layer.media_type}", "only tar, gzip and zstd are known")
    config = store.read(manifest.config.digest, manifest.config.size)
    layers = tuple(Blob(layer.digest, layer.size, _opener(store, layer)) for layer in manifest.layers)
    return Image(text, found.digest, found.media_type or manifest.media_type, config, layers)


def _opener(store: Store, layer: Descriptor) -> Callable[[threading.Event], Source]:
    return lambda stopped: store.open(layer.digest, layer.size, stopped)


def _choose(manifests: list[Descriptor], platform: str, text: str) -> Descriptor:
    wanted = (platform or f"linux/{ARCHITECTURES.get(machine.machine(), machine.machine())}").split("/")
    fits = [
        entry
        for entry in manifests
        if entry.platform is not None
        and [entry.platform.os, entry.platform.architecture] == wanted[:2]
        and (len(wanted) == 2 or entry.platform.variant == wanted[2])
    ]
    if fits:
        return fits[0]
    if len(manifests) == 1 and manifests[0].platform is None:
        return manifests[0]
    there = ", ".join(
        sorted(f"{entry.platform.os}/{entry.platform.architecture}" for entry in manifests if entry.platform)
    )
    raise UsageError(f"{text} has no image for {'/'.join(wanted)}", f"choose with --platform: {there or 'none stated'}")


def _from_index(text: str, raw: bytes, store: Store, tag: str, platform: str) -> Image:
    """An OCI layout's index.json, which lists images rather than platforms of one."""
    manifests = _parse(_Index, raw, "index.json").manifests
    if tag:
        manifests = [entry for entry in manifests if _is_named(entry, tag)]
        if not manifests:
            raise UsageError(f"{text}: no image of the name '{tag}' there")
    only_one = len({entry.digest for entry in manifests}) == 1
    found = manifests[0] if only_one else _choose(manifests, platform, text)
    return from_descriptor(text, found, store.read(found.digest, found.size), store, platform)


def _is_named(entry: Descriptor, tag: str) -> bool:
    names = entry.annotations or {}
    return tag in (names.get(REF_NAME), names.get("io.containerd.image.name"))


def _parse(model: type[T], raw: bytes, name: str) -> T:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise BadImage(f"{name} cannot be read ({error.errors()[0]['msg']})", "fetch or build it again") from None


def _read_index(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path.parent} is no OCI layout", "it has no index.json") from None


class LayoutStore(Store):
    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs"

    def open(self, digest: str, size: int, stopped: threading.Event | None = None) -> Source:
        path = self._blobs / digest.replace(":", "/", 1)
        try:
            source = path.open("rb", buffering=0)
        except OSError as error:
            raise BadImage(f"{path} cannot be read ({error.strerror})", "the layout is not whole") from None
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return source


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


def _archive_image(text: str, path: Path, tag: str, platform: str) -> Image:
    store = ArchiveStore(path)
    if store.has("index.json"):
        return _from_index(text, store.text("index.json"), store, tag, platform)
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
    diffs = _parse(_RootFs, config, saved[0].config).rootfs.diff_ids
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

"""Manifests and indexes: which image they describe, and the blobs that it is made of."""

from __future__ import annotations

import hashlib
import platform as machine
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sqsh.errors import BadImage, UsageError
from sqsh.reference import DIGEST

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


class Source(Protocol):
    """Where the compressed bytes come from."""

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Blob:
    """One layer or other blob: its digest and size as the manifest states them, and how to open it."""

    digest: str
    size: int
    open: Callable[[threading.Event], Source]  # the event: nobody reads on


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
        chosen = _choose(parse(_Index, raw, found.digest).manifests, platform, text)
        return from_descriptor(text, chosen, store.read(chosen.digest, chosen.size), store, platform)
    manifest = parse(_Manifest, raw, found.digest)
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


def from_index(text: str, raw: bytes, store: Store, tag: str, platform: str) -> Image:
    """An OCI layout's index.json, which lists images rather than platforms of one."""
    manifests = parse(_Index, raw, "index.json").manifests
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


def parse(model: type[T], raw: bytes, name: str) -> T:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise BadImage(f"{name} cannot be read ({error.errors()[0]['msg']})", "fetch or build it again") from None

"""Manifests and indexes: which image they describe, and the blobs that it is made of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform as machine
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sqsh.errors import BadImage, UsageError
from sqsh.names import Named, by_name, which
from sqsh.reference import DIGEST

MAX_JSON = 16 << 20
MAX_INDEXES = 8  # one in the other
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
LAYERS = re.compile(
    r"application/vnd\.(oci\.image\.layer(\.nondistributable)?\.v1\.tar|docker\.image\.rootfs(\.foreign)?\.diff\.tar)"
    r"([+.](gzip|zstd))?"
)
REF_NAME = "org.opencontainers.image.ref.name"
FULL_NAME = "io.containerd.image.name"
T = TypeVar("T", bound=BaseModel)
ALIASES = {  # as uname and others call them
    "x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "i386": "386", "i686": "386",
    "armhf": "arm/v7", "armv7l": "arm/v7", "armel": "arm/v6", "armv6l": "arm/v6",
}  # fmt: skip
VARIANT = re.compile(r"v\d{1,3}(\.\d{1,3})*")
SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+"


class Source(Protocol):
    """Where the compressed bytes come from."""

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Blob:
    """One layer: its digest and size as the manifest states them, and how to open it.

    `of_tar`: the digest is that of the unpacked tar (a diff ID), however it is packed; the size never is.
    """

    digest: str
    size: int
    open: Callable[[threading.Event], Source]  # the event: nobody reads on
    of_tar: bool = False


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


class Store(ABC):
    """Opens blobs by digest. `size` is what a manifest states; `stopped` ends whatever reading them may wait for."""

    @abstractmethod
    def open(self, digest: str, size: int, stopped: threading.Event | None = None) -> Source: ...

    def read_manifest(self, digest: str, size: int) -> bytes:
        """A manifest or an index that another index names, checked."""
        return self.read(digest, size)

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


class _Stated(BaseModel):
    """What is null is as good as left out, as Go has it."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        return {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else value


class Platform(_Stated):
    """System, processor and its variant, as an index or a configuration states them."""

    model_config = ConfigDict(frozen=True)

    os: str = ""
    architecture: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(word for word in (self.os, self.architecture, self.variant) if word)

    @classmethod
    def of(cls, text: str) -> Platform:
        """From `os/architecture[/variant]`; other names of the same are one."""
        system, architecture, variant = (*text.split("/"), "")[:3]
        return cls(os=system, architecture=architecture, variant=variant).plain

    @property
    def plain(self) -> Platform:
        """In the spelling that containerd has too: arm64/v8 and amd64/v1 are what every such processor is."""
        words = ALIASES.get(self.architecture.lower(), self.architecture.lower()).split("/")
        variant = self.variant.lower() or (words[1] if len(words) > 1 else "")
        variant = f"v{variant}" if variant.isdigit() else variant
        if (words[0], variant) in (("arm64", "v8"), ("amd64", "v1")):
            variant = ""
        return Platform(os=self.os.lower(), architecture=words[0], variant=variant)

    def fits(self, wanted: Platform) -> bool:
        """Both plain. A variant counts only where both state one; what runs on an older one runs on a newer."""
        if (self.os, self.architecture) != (wanted.os, wanted.architecture):
            return False
        if not self.variant or not wanted.variant or self.variant == wanted.variant:
            return True
        return bool(self.level) and self.level <= wanted.level

    @property
    def level(self) -> tuple[int, ...]:
        """The variant as a number, such as (7,) or (8, 2); empty for what is none."""
        return tuple(map(int, self.variant[1:].split("."))) if VARIANT.fullmatch(self.variant) else ()


class Descriptor(_Stated):
    model_config = ConfigDict(frozen=True)

    digest: str = Field(pattern=f"^{DIGEST}$")
    size: int = Field(ge=0)
    media_type: str = Field(default="", alias="mediaType")
    platform: Platform | None = None
    annotations: dict[str, str | None] | None = None


class _Index(BaseModel):
    manifests: list[Descriptor]


class _Manifest(BaseModel):
    media_type: str | None = Field(default=None, alias="mediaType")
    config: Descriptor
    layers: Annotated[list[Descriptor], BeforeValidator(lambda value: value or [])] = Field(max_length=4096)


def from_descriptor(text: str, found: Descriptor, raw: bytes, store: Store, platform: str) -> Image:
    """The image behind a manifest or an index whose bytes are `raw`."""
    for _ in range(MAX_INDEXES):
        if not (found.media_type in INDEXES or (found.media_type not in MANIFESTS and b'"manifests"' in raw)):
            break
        found = _choose(parse(_Index, raw, found.digest).manifests, platform, text)
        raw = store.read_manifest(found.digest, found.size)
    refuse_schema_1(text, raw, found.media_type)
    manifest = parse(_Manifest, raw, found.digest)
    for layer in manifest.layers:
        if layer.media_type and not LAYERS.fullmatch(layer.media_type):
            raise BadImage(f"{text} has a layer of the type {layer.media_type}", "only tar, gzip and zstd are known")
    config = store.read(manifest.config.digest, manifest.config.size)
    layers = tuple(Blob(layer.digest, layer.size, _opener(store, layer)) for layer in manifest.layers)
    # A registry may call it anything; only OCI's may leave its type out.
    media_type = manifest.media_type or (found.media_type if found.media_type in MANIFESTS else MANIFESTS[0])
    return Image(text, found.digest, media_type, config, layers)


def refuse_schema_1(text: str, raw: bytes, media_type: str) -> None:
    """Its digest is not even that of its bytes, so this comes before any other check."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        if media_type.startswith(SCHEMA_1) or json.loads(raw).get("schemaVersion") == 1:
            raise BadImage(
                f"{text} has a manifest of schema 1, which Docker gave up in 2017", "push it again with a newer Docker"
            )


def _opener(store: Store, layer: Descriptor) -> Callable[[threading.Event], Source]:
    return lambda stopped: store.open(layer.digest, layer.size, stopped)


def _choose(manifests: list[Descriptor], platform: str, text: str) -> Descriptor:
    wanted = Platform.of(platform or f"linux/{machine.machine()}")
    stated = [(entry, entry.platform.plain) for entry in manifests if entry.platform is not None]
    fits = [(entry, found) for entry, found in stated if found.fits(wanted)]
    if fits:
        # what is asked for, then what any such processor runs, then the newest if a variant is asked for, or the first
        def order(pair: tuple[Descriptor, Platform]) -> tuple[bool, bool, list[int]]:
            newest = [-number for number in pair[1].level] if wanted.variant else []
            return pair[1].variant != wanted.variant, pair[1].variant != "", newest

        return min(fits, key=order)[0]
    if len(manifests) == 1 and not stated:
        return manifests[0]
    there = ", ".join(sorted({str(found) for _, found in stated}))
    raise UsageError(
        f"{text} has no image for {platform or wanted}", f"choose with --platform: {there or 'none stated'}"
    )


def from_index(text: str, raw: bytes, store: Store, tag: str, platform: str) -> Image:
    """An OCI layout's index.json, which lists images rather than platforms of one."""
    manifests = parse(_Index, raw, "index.json").manifests
    named = [Named(_names(entry), entry) for entry in manifests]
    found = list({entry.digest: entry for entry in by_name(text, tag, named)}.values())
    if len(found) > 1 and all(entry.platform for entry in found):
        chosen = _choose(found, platform, text)
        found = [entry for entry in found if _plain(entry) == _plain(chosen)]
    if len(found) > 1:
        raise which(text, len(found), [entry for entry in named if entry.image in found])
    return from_descriptor(text, found[0], store.read_manifest(found[0].digest, found[0].size), store, platform)


def _names(entry: Descriptor) -> list[str]:
    """The name that docker and containerd write, the tag, and the digest."""
    stated = entry.annotations or {}
    return [*filter(None, (stated.get(FULL_NAME), stated.get(REF_NAME))), entry.digest]


def _plain(entry: Descriptor) -> Platform | None:
    return entry.platform.plain if entry.platform else None


def parse(model: type[T], raw: bytes, name: str) -> T:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise BadImage(f"{name} cannot be read ({error.errors()[0]['msg']})", "fetch or build it again") from None

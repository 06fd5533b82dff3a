"""Images in an OCI layout or a registry: read their manifests, and check that their bytes match their digests."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kit.command import last_lines, run
from kit.errors import KitError, UsageError
from kit.files import sha256_of

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?/")
REGISTRY_TIMEOUT = "60s"


class Descriptor(BaseModel):
    model_config = ConfigDict(frozen=True)

    digest: str = Field(pattern=f"^{DIGEST.pattern}$")
    size: int = Field(ge=0)
    media_type: str = Field(default="", alias="mediaType")


class _Index(BaseModel):
    manifests: list[Descriptor]


class Manifest(BaseModel):
    config: Descriptor
    layers: list[Descriptor]


def registry_digest(reference: str) -> str:
    """The digest that the registry reports for `registry/repository[:tag|@digest]`. Raises KitError."""
    limit = f"--command-timeout={REGISTRY_TIMEOUT}"
    words = ["skopeo", limit, "inspect", "--raw", *tls_option(reference), f"docker://{reference}"]
    finished = run(words, check=False)
    if finished.returncode != 0:
        hint = "see that the registry is up, holds this image and lets you read it (skopeo login)"
        raise KitError(f"cannot read {reference} ({_complaint(finished.stderr)})", hint)
    return f"sha256:{hashlib.sha256(finished.stdout.encode()).hexdigest()}"


def tls_option(reference: str, option: str = "--tls-verify") -> tuple[str, ...]:
    """Plain HTTP for a registry on this machine, as Docker does; TLS for all others."""
    return (f"{option}=false",) if LOOPBACK.match(reference) else ()


def layout_image(layout: Path) -> Descriptor:
    """The only image of a layout. Raises UsageError where there is none or more than one."""
    try:
        manifests = _Index.model_validate_json((layout / "index.json").read_bytes()).manifests
    except FileNotFoundError:
        raise UsageError(f"{layout} is no OCI layout", "it has no index.json") from None
    except ValidationError as error:
        raise KitError(
            f"{layout / 'index.json'} cannot be read ({error.errors()[0]['msg']})", "make it again"
        ) from None
    if len(manifests) != 1:
        raise UsageError(f"{layout} holds {len(manifests)} images", "give a layout that holds one")
    return manifests[0]


def read_manifest(layout: Path, digest: str) -> Manifest:
    try:
        return Manifest.model_validate_json(blob(layout, digest).read_bytes())
    except (FileNotFoundError, ValidationError):
        raise KitError(f"{layout} has no image manifest {digest}", "make the image again") from None


def blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/", 1)


def image_size(image: Descriptor, manifest: Manifest) -> int:
    """Bytes of the manifest, the configuration and the compressed layers."""
    return image.size + manifest.config.size + sum(layer.size for layer in manifest.layers)


def check_layout(layout: Path) -> str:
    """Hash every blob of the layout's image and return the image's digest. Raises KitError for a blob that differs."""
    image = layout_image(layout)
    _check_blob(layout, image)
    manifest = read_manifest(layout, image.digest)
    for descriptor in (manifest.config, *manifest.layers):
        _check_blob(layout, descriptor)
    return image.digest


def _check_blob(layout: Path, descriptor: Descriptor) -> None:
    path = blob(layout, descriptor.digest)
    if not path.is_file():
        raise KitError(f"{layout} lacks the blob {descriptor.digest}")
    if path.stat().st_size != descriptor.size or f"sha256:{sha256_of(path)}" != descriptor.digest:
        raise KitError(f"{path} does not hash to its name")


def _complaint(log: str) -> str:
    """The last error in skopeo's log, without the image name."""
    found = re.search(r'level=fatal msg="(?:Error parsing image name [^ ]+ )?(.*)"', log)
    return found[1].replace('\\"', '"') if found else last_lines(log)

"""Images as they lie in an OCI layout or a registry: which one is meant, and whether its bytes are what they say."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
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
    media_type: str = Field(default="", alias="mediaType")
    config: Descriptor
    layers: list[Descriptor]


@dataclass(frozen=True)
class ImageSource:
    """One image: its digest, and how skopeo is told to read it."""

    text: str
    digest: str
    media_type: str
    skopeo_name: str
    skopeo_options: tuple[str, ...] = ()


def find_image(text: str) -> ImageSource:
    """The image that `text` names: the folder of an OCI layout, or a registry's reference, by digest or tag."""
    folder = Path(text)
    if folder.is_dir():
        return _in_layout(folder.resolve())
    if text.startswith((".", "/")):
        raise UsageError(f"no OCI layout at {text}", "name its folder, or registry/repository@sha256:…")
    return _in_registry(text.removeprefix("docker://"))


def registry_digest(reference: str) -> tuple[str, str]:
    """Digest and media type that the registry answers with for `registry/repository[:tag|@digest]`."""
    limit = f"--command-timeout={REGISTRY_TIMEOUT}"
    words = ["skopeo", limit, "inspect", "--raw", *tls_option(reference), f"docker://{reference}"]
    finished = run(words, check=False)
    if finished.returncode != 0:
        hint = "see that the registry is up, holds this image and lets you read it (skopeo login)"
        raise KitError(f"cannot read {reference} ({_complaint(finished.stderr)})", hint)
    raw = finished.stdout.encode()
    return f"sha256:{hashlib.sha256(raw).hexdigest()}", _media_type(raw)


def tls_option(reference: str, option: str = "--tls-verify") -> tuple[str, ...]:
    """Plain HTTP for a registry on this machine, as Docker has it; TLS for every other."""
    return (f"{option}=false",) if LOOPBACK.match(reference) else ()


def layout_image(layout: Path) -> Descriptor:
    """The one image that a layout holds."""
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


def check_layout(layout: Path) -> str:
    """Hash every blob of the layout's image again and return the image's digest."""
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


def _in_layout(layout: Path) -> ImageSource:
    if ":" in str(layout):
        raise UsageError(f"skopeo cannot read a layout whose path has a colon: {layout}", "move it")
    image = layout_image(layout)
    return ImageSource(str(layout), image.digest, image.media_type, f"oci:{layout}")


def _in_registry(reference: str) -> ImageSource:
    digest, media_type = registry_digest(reference)
    repository = _repository(reference)
    named = reference.partition("@")[2]
    if named and named != digest:
        raise KitError(f"the registry answers {digest} for {reference}", "its content is not what was asked for")
    return ImageSource(
        reference,
        digest,
        media_type,
        f"docker://{repository}@{digest}",
        tls_option(reference, "--src-tls-verify"),
    )


def _repository(reference: str) -> str:
    """The reference without digest and tag; a colon before the last slash belongs to the registry's port."""
    name = reference.partition("@")[0]
    head, slash, tail = name.rpartition("/")
    return f"{head}{slash}{tail.partition(':')[0]}"


def _complaint(log: str) -> str:
    """What skopeo says at the end of its log, without what we know already."""
    found = re.search(r'level=fatal msg="(?:Error parsing image name [^ ]+ )?(.*)"', log)
    return found[1].replace('\\"', '"') if found else last_lines(log)


def _media_type(manifest: bytes) -> str:
    try:
        return Manifest.model_validate_json(manifest).media_type
    except ValidationError:
        return ""

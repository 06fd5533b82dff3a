"""Which image a text names: in an OCI layout, in an archive, or in a registry."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sqsh.archive import archive_image
from sqsh.errors import UsageError
from sqsh.layout import layout_image
from sqsh.manifest import Descriptor, Image, parse
from sqsh.registry import registry_image


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
        return registry_image(text, platform, note)
    if place.is_dir():
        return layout_image(text, place, tag, platform)
    return archive_image(text, place, tag, platform)


def _refuse_another(image: Image, wanted: list[str]) -> None:
    """A variant counts only where the image states one: many that have one do not."""
    config = parse(Descriptor.Platform, image.config, f"the configuration of {image.text}")
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

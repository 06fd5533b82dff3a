"""Which image a text names: in an OCI layout, in an archive, or in a registry."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sqsh.archive import archive_image
from sqsh.errors import UsageError
from sqsh.layout import layout_image
from sqsh.manifest import Image, Platform, parse
from sqsh.registry import registry_image
from sqsh.stream import Limits

LIMITS = Limits()


def find_image(
    text: str, platform: str = "", note: Callable[[str], None] = lambda text: None, limits: Limits = LIMITS
) -> Image:
    """The image that `text` names: a layout's folder, an archive, `DIR:TAG` of either, or a registry's reference.

    With a `platform`, such as linux/arm64, an index's image for it; any other image must say that it is for it.
    `note` is told what there is to wait for, and `limits` are those of an archive that is compressed as a whole.
    """
    if platform and len(platform.split("/")) not in (2, 3):
        raise UsageError(f"'{platform}' is no platform", "write os/architecture, such as linux/amd64")
    place, tag = _place(text)
    if place is None:
        if text.startswith((".", "/")) or "/./" in text:
            raise UsageError(f"no OCI layout at {text}", "name its folder, an archive, or registry/repository@sha256:…")
        image = registry_image(text, platform, note)
    elif place.is_dir():
        image = layout_image(text, place, tag, platform)
    elif not place.is_file():
        raise UsageError(f"{place} is no plain file", "an archive is read in several places: write it to a file first")
    else:
        image = archive_image(text, place, tag, platform, limits, note)
    if platform:
        _refuse_another(image, platform)
    return image


def _refuse_another(image: Image, platform: str) -> None:
    """A variant counts only where the image states one: many that have one do not."""
    wanted, config = Platform.of(platform), parse(Platform, image.config, f"the configuration of {image.text}")
    if not config.plain.fits(wanted):
        there = str(config) or "no stated platform"
        raise UsageError(f"{image.text} is an image for {there}, not for {platform}")


def _place(text: str) -> tuple[Path | None, str]:
    plain = re.sub(r"^(oci|docker-archive|oci-archive):(?=[^/]|/[^/])", "", text)
    if Path(plain).exists():
        return Path(plain), ""
    for colon in re.finditer(":(?!//)", plain):
        place = Path(plain[: colon.start()])
        if place.is_file() or (place / "index.json").exists():
            return place, plain[colon.end() :]
    return None, ""

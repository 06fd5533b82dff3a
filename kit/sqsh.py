"""Turn an image into a squashfs that `enroot start`, pyxis and `./build.py run` can start, and record it.

The `sqsh` package does the conversion. The bytes depend on the image's digest, its name and the options only: neither
on where the image was read from nor on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kit.errors import KitError, UsageError
from kit.files import sha256_of
from kit.layout import Release, only_run, release, state_dir
from kit.record import SqshSection, add_section, read_record
from kit.steps import complete_step, say, size_text
from sqsh import errors
from sqsh.convert import Options, Result, convert, stated, versions
from sqsh.image import find_image
from sqsh.image_json import IMAGE_JSON
from sqsh.manifest import Image
from sqsh.verify import verify

__all__ = ["IMAGE_JSON", "make_sqsh"]


def make_sqsh(name: str, source: str, wanted: Options, use_cache: bool = True, check: bool = False) -> SqshSection:
    """Make `dist/<name>/<name>.sqsh` from the release's own layout, or from `source`, and record it.

    `source` is an OCI layout, an archive of `docker save`, or `registry/repository@sha256:…` (a tag is resolved). What
    is already there and made from the same digest with the same options stays. `check` reads the result back and
    compares it with the layers.
    """
    made = release(name)
    options = replace(wanted, name=name, cache=state_dir() / "sqsh-cache" if use_cache else None, note=say)
    with only_run(f"sqsh-{name}"), _kit_errors():
        image = _image_of(made, source, options.platform)
        section = _current(made, image, options)
        if section is not None:
            say(f"{made.sqsh.name} was made from {image.digest[:19]}… already and is unchanged: kept")
        else:
            section = _convert(made, image, options)
        if check:
            with complete_step(f"Verify {made.sqsh.name} against the layers") as step:
                step.note(f"{verify(image, made.sqsh, options)} entries")
        return section


def _convert(made: Release, image: Image, options: Options) -> SqshSection:
    made.folder.mkdir(parents=True, exist_ok=True)
    with complete_step(f"Convert {image.text} to {made.sqsh.name}") as step:
        result = convert(image, made.sqsh, options)
        step.note(size_text(result.size))
        if result.layers_copied:
            step.note(f"{result.layers_copied} of {result.layers} layers as before")
    section = _section(made, result)
    if made.record.exists():
        add_section(made.record, section, replace=True)
    return section


def _image_of(made: Release, source: str, platform: str) -> Image:
    if not source and not (made.oci / "index.json").exists():
        raise UsageError(f"no image at {made.oci}", "make it first: ./build.py image, or name a SOURCE")
    image = find_image(source or str(made.oci), platform, say)
    recorded = read_record(made.record).image.digest if made.record.exists() else image.digest
    if recorded != image.digest:
        raise UsageError(
            f"{image.text} is {image.digest}, but release '{made.name}' is {recorded}",
            "give it a name of its own with --name",
        )
    return image


def _current(made: Release, image: Image, options: Options) -> SqshSection | None:
    """The record's section, if it describes what would be made now and the file is unchanged."""
    section = read_record(made.record).sqsh if made.record.exists() else None
    if section is None or section.source_digest != image.digest:
        return None
    if section.options != stated(options) or section.tools != versions(options):
        return None
    if not made.sqsh.exists() or made.sqsh.stat().st_size != section.size or sha256_of(made.sqsh) != section.sha256:
        return None
    return section


def _section(made: Release, result: Result) -> SqshSection:
    return SqshSection(
        path=made.sqsh.name,
        sha256=sha256_of(made.sqsh),
        size=made.sqsh.stat().st_size,
        source_digest=result.digest,
        options=dict(result.options),
        tools=dict(result.versions),
    )


@contextmanager
def _kit_errors() -> Iterator[None]:
    """Raise the converter's errors, which do not depend on the kit, as the kit's."""
    try:
        yield
    except errors.UsageError as error:
        raise UsageError(error.what, error.hint) from error
    except errors.SqshError as error:
        raise KitError(error.what, error.hint) from error

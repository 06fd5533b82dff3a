"""Turn an image into a squashfs that `enroot start`, pyxis and `./build.py run` can start.

The station is `make_sqsh`; `convert` is the seam behind which the conversion itself lies. The bytes depend on the
image's digest, its name and the options only: neither on where it was read from nor on the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit import rootfs
from kit.command import run
from kit.enroot_files import ImageConfig, parse_config, start_files
from kit.errors import KitError, UsageError
from kit.files import finished_file, sha256_of
from kit.layout import Release, only_run, release
from kit.oci import ImageSource, blob, find_image, layout_image, read_manifest
from kit.record import SqshSection, add_section, read_record
from kit.steps import complete_step, say, size_text

IMAGE_JSON = "opt/release/image.json"
OPTIONS = {"compressor": "zstd", "level": "1", "block_size": "131072"}
WORK_PREFIX = ".sqsh-"
FULL_BELOW = 8_000_000  # bytes; the tools stop at the first block that does not fit
IMAGE_JSON = "opt/release/image.json"


def make_sqsh(name: str, source: str = "") -> SqshSection:
    """Make `dist/<name>/<name>.sqsh` from the release's own layout, or from `source`, and record it.

    `source` is an OCI layout or `registry/repository@sha256:…` (a tag is resolved). What is already there and made
    from the same digest with the same options stays.
    """
    made = release(name)
    with only_run(f"sqsh-{name}"):
        image = _image_of(made, source)
        if (current := _current(made, image)) is not None:
            say(f"{made.sqsh.name} was made from {image.digest[:19]}… already and is unchanged: kept")
            return current
        _remove_leftovers(made.folder)
        with complete_step(f"Convert {image.text} to {made.sqsh.name}") as step:
            with finished_file(made.sqsh) as part, _work_folder(made.folder) as work:
                convert(image, part, name, work)
            step.note(size_text(made.sqsh.stat().st_size))
        section = _section(made, image)
        if made.record.exists():
            add_section(made.record, section, replace=True)
        return section


def convert(image: ImageSource, out: Path, name: str, work: Path) -> None:
    """Write the image as a squashfs to `out`; `work` is an empty folder for what lies between the two."""
    layout, tree = work / "layout", work / "rootfs"
    since = time.time()
    with complete_step("Copy and check the layers"):
        run(["skopeo", "copy", "--quiet", *image.skopeo_options, image.skopeo_name, f"oci:{layout}:image"])
    with complete_step("Unpack the layers"):
        _check_room(layout, work)
        run(["umoci", "raw", "unpack", "--image", f"{layout}:image", tree])
        config = parse_config(_config_of(layout))
        shutil.rmtree(layout)
    with complete_step("Add what starts it"):
        _add_files(tree, config, image, name)
        rootfs.settle_times(tree, since, config.epoch)
    with complete_step("Compress"):
        _squash(tree, out, config.epoch)


def image_json(image: ImageSource, name: str) -> str:
    """`/opt/release/image.json`: which image a run inside the squashfs proves."""
    return json.dumps({"digest": image.digest, "name": name, "media_type": image.media_type}, indent=2) + "\n"


def _add_files(tree: Path, config: ImageConfig, image: ImageSource, name: str) -> None:
    added = start_files(config)
    for warning in added.warnings:
        say(f"note: {warning}")
    for path, text in {**added.contents, IMAGE_JSON: image_json(image, name)}.items():
        rootfs.write_file(tree, path, text.encode(), 0o644, config.epoch)
    rootfs.make_folder(tree, config.workdir, config.epoch)
    rootfs.empty_folder(tree, "dev")
    rootfs.open_to_owner(tree)


def _squash(tree: Path, out: Path, epoch: int) -> None:
    run(
        [
            "mksquashfs", tree, out,
            "-noappend",
            "-no-progress",
            "-exit-on-error",  # an unreadable file must not become an empty one
            "-all-root",
            "-comp", OPTIONS["compressor"],
            "-Xcompression-level", OPTIONS["level"],
            "-b", OPTIONS["block_size"],
            "-mkfs-time", str(epoch),  # the one time in the file that is not the image's own
        ]
    )  # fmt: skip


def _image_of(made: Release, source: str) -> ImageSource:
    if not source and not (made.oci / "index.json").exists():
        raise UsageError(f"no image at {made.oci}", "make it first: ./build.py image, or name a SOURCE")
    image = find_image(source or str(made.oci))
    recorded = read_record(made.record).image.digest if made.record.exists() else image.digest
    if recorded != image.digest:
        raise UsageError(
            f"{image.text} is {image.digest}, but release '{made.name}' is {recorded}",
            "give it a name of its own with --name",
        )
    return image


def _current(made: Release, image: ImageSource) -> SqshSection | None:
    """The record's section, if it speaks of what would be made now and the file there is still that one."""
    section = read_record(made.record).sqsh if made.record.exists() else None
    if section is None or section.source_digest != image.digest or section.options != OPTIONS:
        return None
    if not made.sqsh.exists() or made.sqsh.stat().st_size != section.size or sha256_of(made.sqsh) != section.sha256:
        return None
    return section


def _section(made: Release, image: ImageSource) -> SqshSection:
    return SqshSection(
        path=made.sqsh.name,
        sha256=sha256_of(made.sqsh),
        size=made.sqsh.stat().st_size,
        source_digest=image.digest,
        options=OPTIONS,
        tools={
            "skopeo": run(["skopeo", "--version"]).stdout.split()[-1],
            "umoci": run(["umoci", "--version"]).stdout.split()[2],
            "mksquashfs": run(["mksquashfs", "-version"], check=False).stdout.split()[2],
        },
    )


def _config_of(layout: Path) -> bytes:
    """The image configuration in a layout that holds one image."""
    manifest = read_manifest(layout, layout_image(layout).digest)
    return blob(layout, manifest.config.digest).read_bytes()


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """A folder beside the output, so that the output's disk is the only one that can fill; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=parent) as work:
        try:
            yield Path(work)
        except KitError as error:
            if "o space left on device" not in str(error) and shutil.disk_usage(work).free >= FULL_BELOW:
                raise
            raise _disk_full(parent) from error


def _check_room(layout: Path, work: Path) -> None:
    """Refuse to unpack what cannot fit: umoci, when the disk fills, may end in a panic that does not say so."""
    manifest = read_manifest(layout, layout_image(layout).digest)
    needed = sum(_unpacked_size(blob(layout, layer.digest)) for layer in manifest.layers)
    if needed > shutil.disk_usage(work).free:
        raise _disk_full(work, needed)


def _unpacked_size(layer: Path) -> int:
    """At least how many bytes a gzip file unpacks to: its last four hold that size modulo 2^32."""
    with layer.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
    least = layer.stat().st_size * 99 // 100 - 100  # what cannot be compressed grows by less than that
    return size + max(0, -((size - least) // 2**32)) * 2**32


def _disk_full(folder: Path, needed: int = 0) -> KitError:
    free = size_text(shutil.disk_usage(folder).free)
    what = f", where unpacking needs {size_text(needed)} and {free} are free" if needed else ""
    return KitError(f"no space left on device for {folder}{what}", "make room for four times the compressed image")


def _remove_leftovers(folder: Path) -> None:
    """What a conversion that was killed outright has left; the lock says that none is running."""
    for left in folder.glob(f"{WORK_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)

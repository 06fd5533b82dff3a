"""Compare two images, layer by layer and file by file; layers are read as streams, nothing is unpacked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kit.errors import CHECK_FAILED, KitError, UsageError
from kit.layout import release
from kit.steps import complete_step, size_text
from sqsh.cancel import Cancel, in_thread
from sqsh.errors import SqshError
from sqsh.image import find_image
from sqsh.manifest import Blob, Image
from sqsh.stream import LayerStream, Limits
from sqsh.tar import BLOCK_DEVICE, CHAR, FIFO, FILE, FOLDER, LINK, SYMLINK, Member, TarReader

READ_SIZE = 1 << 20
KINDS = {
    FILE: "file",
    LINK: "hard link",
    SYMLINK: "symbolic link",
    CHAR: "character device",
    BLOCK_DEVICE: "block device",
    FOLDER: "folder",
    FIFO: "fifo",
}
Values = tuple[str | None, str | None]
"""A value in the first image and in the second; None where it is absent."""
Facts = dict[str, str]
"""The compared properties of one entry of a layer, by name."""


class Change(BaseModel):
    """One entry of a layer; `what` says which of its properties differ, and how."""

    model_config = ConfigDict(frozen=True)

    path: str
    change: Literal["added", "removed", "changed"]
    what: dict[str, Values] = {}


class LayerDifference(BaseModel):
    """Two corresponding layers, the lowest being number 1; None where an image has no such layer."""

    model_config = ConfigDict(frozen=True)

    numbers: tuple[int | None, int | None]
    digests: Values
    changes: list[Change] = []
    note: str = ""


class ConfigDifference(BaseModel):
    model_config = ConfigDict(frozen=True)

    key: str
    values: Values


class Difference(BaseModel):
    model_config = ConfigDict(frozen=True)

    equal: bool
    images: tuple[str, str]
    digests: tuple[str, str]
    config: list[ConfigDifference] = []
    layers: list[LayerDifference] = []


def diff_images(first: str, second: str) -> Difference:
    """Compare two images, each a release's name, an OCI layout, an archive of `docker save` or a registry's reference.

    Raises UsageError (exit status 2) for an image that cannot be read, as status 1 means that the images differ.
    """
    try:
        images = _find(first), _find(second)
        digests = images[0].digest, images[1].digest
        if digests[0] == digests[1]:
            return Difference(equal=True, images=(first, second), digests=digests)
        with complete_step(f"Compare {first} and {second}") as step:
            config = list(_config(_parsed(images[0]), _parsed(images[1])))
            layers = in_thread(lambda cancel: list(_layers(*images, cancel)))
            step.note(f"{len(layers)} layers differ")
    except (SqshError, KitError) as error:
        raise UsageError(error.what, error.hint) from error
    return Difference(equal=False, images=(first, second), digests=digests, config=config, layers=layers)


def report_difference(difference: Difference) -> int:
    """Print one line per difference and return the exit status."""
    for line in _lines(difference):
        print(line)
    return 0 if difference.equal else CHECK_FAILED


def _lines(difference: Difference) -> Iterator[str]:
    if difference.equal:
        yield f"equal: {difference.digests[0]}"
        return
    yield f"{difference.images[0]}: {difference.digests[0]}"
    yield f"{difference.images[1]}: {difference.digests[1]}"
    for entry in difference.config:
        yield f"configuration: {entry.key}: {_arrow(entry.values)}"
    for layer in difference.layers:
        numbers = sorted({str(number) for number in layer.numbers if number is not None})
        yield f"layer {' and '.join(numbers)}: {layer.note or f'{len(layer.changes)} entries differ'}"
        for change in layer.changes:
            what = "; ".join(f"{name} {_arrow(values)}" for name, values in change.what.items())
            yield f"  {change.change} {change.path}{f': {what}' if what else ''}"


def _arrow(values: Values) -> str:
    return " → ".join("none" if value is None else value for value in values)


def _find(text: str) -> Image:
    """A release of that name, unless there is a file or folder of it (a tag may follow behind a colon)."""
    if "/" in text or Path(text.partition(":")[0]).exists():
        return find_image(text)
    layout = release(text).oci
    if not layout.is_dir():
        raise UsageError(f"no release or file '{text}'", "name one of dist, a layout, or registry/repository:tag")
    return find_image(str(layout))


def _parsed(image: Image) -> Any:
    try:
        return json.loads(image.config)
    except ValueError:
        raise UsageError(f"the configuration of {image.text} is no JSON", "fetch or build the image again") from None


def _config(first: Any, second: Any, key: str = "") -> Iterator[ConfigDifference]:
    """Every value that differs, under its path. The digests of layers are reported with the layers."""
    if key == "rootfs.diff_ids" or first == second:
        return
    if isinstance(first, dict) and isinstance(second, dict):
        for name in sorted(first.keys() | second.keys()):
            yield from _config(first.get(name), second.get(name), f"{key}.{name}" if key else name)
    elif isinstance(first, list) and isinstance(second, list):
        for number, (one, other) in enumerate(zip_longest(first, second)):
            yield from _config(one, other, f"{key}[{number}]")
    else:
        yield ConfigDifference(key=key, values=(_value(first), _value(second)))


def _value(value: object) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True)


def _layers(first: Image, second: Image, cancel: Cancel) -> Iterator[LayerDifference]:
    """The layers that are not in both, those at the same place between common ones held against each other."""
    digests = [layer.digest for layer in first.layers], [layer.digest for layer in second.layers]
    for how, a, a_end, b, b_end in SequenceMatcher(None, *digests, autojunk=False).get_opcodes():
        if how == "equal":
            continue
        for one, other in zip_longest(range(a, a_end), range(b, b_end)):
            if one is None or other is None:
                yield _unpaired(first, one, second, other)
            else:
                yield _pair((one + 1, other + 1), first.layers[one], second.layers[other], cancel)


def _unpaired(first: Image, one: int | None, second: Image, other: int | None) -> LayerDifference:
    blobs = None if one is None else first.layers[one], None if other is None else second.layers[other]
    return LayerDifference(
        numbers=(None if one is None else one + 1, None if other is None else other + 1),
        digests=(blobs[0] and blobs[0].digest, blobs[1] and blobs[1].digest),
        note=f"only in the {'second' if one is None else 'first'} image",
    )


def _pair(numbers: tuple[int, int], first: Blob, second: Blob, cancel: Cancel) -> LayerDifference:
    with ThreadPoolExecutor(2) as pool:
        readings = [pool.submit(_entries, blob, cancel) for blob in (first, second)]
        for reading in wait(readings, return_when=FIRST_EXCEPTION).done:
            if reading.exception() is not None:
                cancel.ask()  # the other side's reading ends too
                reading.result()
        one, other = (reading.result() for reading in readings)
    changes = list(_changes(one, other))
    note = ""
    if not changes:
        same_order = list(one) == list(other)
        note = f"the same entries, {'written or compressed otherwise' if same_order else 'in another order'}"
    return LayerDifference(numbers=numbers, digests=(first.digest, second.digest), changes=changes, note=note)


def _changes(first: dict[bytes, Facts], second: dict[bytes, Facts]) -> Iterator[Change]:
    for path in sorted(first.keys() | second.keys()):
        one, other = first.get(path), second.get(path)
        if one == other:
            continue
        shown = "/" + _printable(path)
        if one is None or other is None:
            yield Change(path=shown, change="added" if one is None else "removed")
            continue
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        yield Change(path=shown, change="changed", what={name: (one.get(name), other.get(name)) for name in names})


def _entries(blob: Blob, cancel: Cancel) -> dict[bytes, Facts]:
    """Every path of a layer in the tar's order; of several entries of one path the last, which counts."""
    found: dict[bytes, Facts] = {}
    with LayerStream(blob, Limits(), lambda size: None, cancel) as stream:
        reader = TarReader(stream, blob.digest)
        for member in reader.members():
            content = hashlib.sha256()
            if member.kind == FILE:
                for block in reader.data(member, READ_SIZE):
                    content.update(block)
            found[b"/".join(member.path)] = _facts(member, content.hexdigest())
    return found


def _facts(member: Member, content: str) -> Facts:
    facts = {
        "type": KINDS[member.kind],
        "mode": f"{member.mode:04o}",
        "owner": f"{member.uid}:{member.gid}",
        "mtime": str(member.mtime),
    }
    if member.kind == FILE:
        facts["content"] = f"sha256:{content} ({size_text(member.size)})"
    elif member.kind == LINK:
        facts["target"] = "/" + _printable(b"/".join(member.target))
    elif member.kind == SYMLINK:
        facts["target"] = _printable(member.link)
    elif member.kind in (CHAR, BLOCK_DEVICE):
        facts["device"] = f"{member.device[0]}:{member.device[1]}"
    for key, value in member.xattrs:
        facts[f"xattr {_printable(key)}"] = _printable(value)
    return facts


def _printable(text: bytes) -> str:
    """For a terminal and for JSON: characters that are not printable are escaped."""
    decoded = text.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in decoded)

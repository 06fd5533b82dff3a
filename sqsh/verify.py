"""Compare a squashfs with the image it was made from, entry by entry and byte by byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from sqsh.cancel import Cancel, in_thread
from sqsh.compress import Block
from sqsh.convert import Layers, Options, final_tree
from sqsh.earlier import Earlier
from sqsh.enroot_files import parse_config
from sqsh.errors import BadImage
from sqsh.file_data import FileData
from sqsh.manifest import Image
from sqsh.reader import Entry, Squashfs
from sqsh.squashfs import Inode

MAX_TOLD = 3


def verify(image: Image, squashfs: Path, options: Options) -> int:
    """Read the image again and the squashfs back; how many entries agree. BadImage names the first that do not."""
    quiet = replace(options, note=lambda text: None)  # what there is to say was said by the conversion
    return in_thread(lambda cancel: _verify(image, squashfs, quiet, cancel))


def _verify(image: Image, squashfs: Path, quiet: Options, cancel: Cancel) -> int:
    layers = Layers(image, _Hashes(quiet.block_size), quiet, None, cancel)
    root = final_tree(layers, image, parse_config(image.config), quiet)
    wanted = dict(_walk(root))
    found = Squashfs(squashfs)
    try:
        there = {}
        for path, entry in found.walk():
            cancel.check()
            there[path] = entry
    finally:
        found.close()
    faults = list(_faults(wanted, there))
    if faults:
        more = f", and {len(faults) - MAX_TOLD} more" if len(faults) > MAX_TOLD else ""
        raise BadImage(f"{squashfs} is not what {image.digest} unpacks to: {'; '.join(faults[:MAX_TOLD])}{more}")
    return len(there)


class _Hashes:
    """Takes content in as its hash."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def add(self, size: int, blocks: Iterable[Block]) -> FileData:
        content = hashlib.sha256()
        for block in blocks:
            content.update(block)
        data = FileData(size)
        data.key = content.digest()
        return data

    def add_earlier(self, old: FileData, earlier: Earlier) -> FileData:
        raise NotImplementedError

    def end_layer(self) -> None:
        pass


def _walk(root: Inode) -> Iterator[tuple[bytes, Inode]]:
    stack = [(b"", root)]
    while stack:
        path, inode = stack.pop()
        yield path, inode
        if isinstance(inode.content, dict):
            stack += [(path + b"/" + name if path else name, child) for name, child in inode.content.items()]


def _faults(wanted: dict[bytes, Inode], there: dict[bytes, Entry]) -> Iterator[str]:
    for path in sorted(wanted.keys() | there.keys()):
        name = "/" + path.decode(errors="backslashreplace")
        if path not in there:
            yield f"{name} is missing"
        elif path not in wanted:
            yield f"{name} is too many"
        elif _of_inode(wanted[path]) != _of_entry(there[path]):
            yield f"{name} differs"
    if _groups((path, id(inode)) for path, inode in wanted.items()) != _groups(
        (path, entry.number) for path, entry in there.items()
    ):
        yield "hard links differ"


def _groups(numbered: Iterable[tuple[bytes, int]]) -> set[tuple[bytes, ...]]:
    groups: dict[int, list[bytes]] = {}
    for path, number in numbered:
        groups.setdefault(number, []).append(path)
    return {tuple(sorted(paths)) for paths in groups.values()}


def _of_inode(inode: Inode) -> tuple[object, ...]:
    content: bytes | int
    size = 0
    if isinstance(inode.content, FileData):
        content, size = inode.content.key, inode.content.size
    else:
        content = b"" if isinstance(inode.content, dict) else inode.content
    return inode.kind, inode.mode, inode.uid, inode.gid, inode.mtime, size, content or b"", inode.xattrs


def _of_entry(entry: Entry) -> tuple[object, ...]:
    return entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime, entry.size, entry.content or b"", entry.xattrs

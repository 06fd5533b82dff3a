"""A squashfs 4.0 file: the data area comes from blocks.py, this adds its tables and the superblock."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from sqsh.blocks import DataArea
from sqsh.compress import Compressor
from sqsh.errors import BadImage
from sqsh.file_data import RAW, FileData, Fragment
from sqsh.writer import write_all

MAGIC = 0x73717368
SUPERBLOCK_SIZE = 96
TABLE_BLOCK = 8192
STORED = 0x8000  # a table block's header: not compressed
NONE = 0xFFFFFFFF
NO_TABLE = 0xFFFFFFFFFFFFFFFF
MAX_LISTED = 256  # names in one run of a directory listing

# Inode types; the extended form of each is 7 more.
FOLDER, FILE, SYMLINK, BLOCK_DEVICE, CHAR, FIFO = 1, 2, 3, 4, 5, 6
EXTENDED = 7
FLAG_DUPLICATES, FLAG_EXPORTABLE, FLAG_NO_XATTRS, FLAG_OPTIONS = 0x40, 0x80, 0x200, 0x400
XATTR_SPACES = ((b"user.", 0), (b"trusted.", 1), (b"security.", 2))

Xattrs = tuple[tuple[bytes, bytes], ...]


class Inode:
    """One inode. `content` is a folder's children by name, a file's data, a link's target or a device's number."""

    __slots__ = ("content", "gid", "kind", "links", "mode", "mtime", "number", "parent", "ref", "uid", "xattrs")

    def __init__(
        self,
        kind: int,
        mode: int,
        uid: int,
        gid: int,
        mtime: int,
        content: dict[bytes, Inode] | FileData | bytes | int,
        xattrs: Xattrs = (),
    ) -> None:
        self.kind = kind
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.mtime = mtime
        self.content = content
        self.xattrs = xattrs
        self.links = 0
        self.number = 0
        self.parent = 0
        self.ref: tuple[int, int] | None = None


@dataclass(frozen=True)
class Written:
    """What the file holds in all."""

    size: int
    inodes: int


def data_start(compressor: Compressor) -> int:
    """Where the data area begins: after the superblock and, where they are not the defaults, compressor options."""
    return SUPERBLOCK_SIZE + (2 + len(compressor.options) if compressor.options else 0)


def write_tables(handle: int, data: DataArea, root: Inode, compressor: Compressor, mkfs_time: int) -> Written:
    """Complete the file behind what `data` has written and cut it to its size; it is still to be synced."""
    count = _number(root)
    ids = _Ids()
    xattrs = _Xattrs(compressor)
    inodes, listings, refs = _inodes(root, ids, xattrs, compressor)
    out = _Tail(handle, data.position)
    inode_start = out.add(inodes.finish())
    listing_start = out.add(listings.finish())
    fragment_start = out.table([_fragment(fragment) for fragment in data.fragments], compressor)
    export_start = out.table([struct.pack("<Q", ref) for ref in refs], compressor)
    id_start = out.table([struct.pack("<I", number) for number in ids.numbers], compressor)
    xattr_start = out.xattrs(xattrs, compressor)
    used = out.position
    out.add(bytes(-used % 4096))
    options = compressor.options
    superblock = struct.pack(
        "<5I6H8Q",
        MAGIC,
        count,
        mkfs_time,
        data.block_size,
        len(data.fragments),
        compressor.number,
        data.block_size.bit_length() - 1,
        FLAG_DUPLICATES | FLAG_EXPORTABLE | (0 if xattrs.sets else FLAG_NO_XATTRS) | (FLAG_OPTIONS if options else 0),
        len(ids.numbers),
        4,
        0,
        _ref(root),
        used,
        id_start,
        xattr_start,
        inode_start,
        listing_start,
        fragment_start,
        export_start,
    )
    head = superblock + (struct.pack("<H", len(options) | STORED) + options if options else b"")
    write_all(handle, [head], 0)
    os.ftruncate(handle, out.position)
    return Written(out.position, count)


class _Tail:
    """What comes behind the data."""

    def __init__(self, handle: int, position: int) -> None:
        self._handle = handle
        self.position = position

    def add(self, data: bytes) -> int:
        start = self.position
        self.position += write_all(self._handle, [data], start)
        return start

    def table(self, entries: list[bytes], compressor: Compressor) -> int:
        """Entries in table blocks, then the list of where those begin, which is what the superblock names."""
        table = _Table(compressor)
        table.add(b"".join(entries))
        blocks, starts = table.finish(), table.starts
        begin = self.add(blocks)
        return self.add(b"".join(struct.pack("<Q", begin + start) for start in starts))

    def xattrs(self, xattrs: _Xattrs, compressor: Compressor) -> int:
        if not xattrs.sets:
            return NO_TABLE
        values = self.add(xattrs.values.finish())
        table = _Table(compressor)
        table.add(b"".join(xattrs.entries))
        blocks, starts = table.finish(), table.starts
        begin = self.add(blocks)
        head = struct.pack("<QII", values, len(xattrs.entries), 0)
        return self.add(head + b"".join(struct.pack("<Q", begin + start) for start in starts))


class _Table:
    """Bytes in compressed blocks of 8 kB."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._filling = bytearray()
        self._blocks: list[bytes] = []
        self.starts: list[int] = []
        self.size = 0  # of the blocks written so far

    @property
    def place(self) -> tuple[int, int]:
        """Where the next byte goes: start of its block, offset in it."""
        return self.size, len(self._filling)

    def add(self, data: bytes) -> None:
        self._filling += data
        if len(self._filling) < TABLE_BLOCK:
            return
        whole = len(self._filling) - len(self._filling) % TABLE_BLOCK
        for at in range(0, whole, TABLE_BLOCK):
            self._flush(bytes(self._filling[at : at + TABLE_BLOCK]))
        del self._filling[:whole]

    def finish(self) -> bytes:
        if self._filling:
            self._flush(bytes(self._filling))
            self._filling.clear()
        return b"".join(self._blocks)

    def _flush(self, block: bytes) -> None:
        (packed,) = self._compressor.pack([block])
        if len(packed) >= len(block):
            entry = struct.pack("<H", len(block) | STORED) + block
        else:
            entry = struct.pack("<H", len(packed)) + packed
        self.starts.append(self.size)
        self._blocks.append(entry)
        self.size += len(entry)


class _Ids:
    """Owners and groups, each stored once."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._places: dict[int, int] = {}

    def place(self, number: int) -> int:
        place = self._places.get(number)
        if place is None:
            place = self._places[number] = len(self.numbers)
            self.numbers.append(number)
            if place > 0xFFFF:
                raise BadImage("the image has more than 65536 owners and groups", "convert without --keep-owner")
        return place


class _Xattrs:
    """Sets of extended attributes, equal ones stored once."""

    def __init__(self, compressor: Compressor) -> None:
        self.values = _Table(compressor)
        self.entries: list[bytes] = []
        self.sets: dict[Xattrs, int] = {}

    def place(self, xattrs: Xattrs) -> int:
        if not xattrs:
            return NONE
        place = self.sets.get(xattrs)
        if place is None:
            place = self.sets[xattrs] = len(self.sets)
            block, offset = self.values.place
            content = b"".join(_xattr(name, value) for name, value in xattrs)
            self.values.add(content)
            self.entries.append(struct.pack("<QII", block << 16 | offset, len(xattrs), len(content)))
        return place


def _xattr(name: bytes, value: bytes) -> bytes:
    for space, number in XATTR_SPACES:
        if name.startswith(space):
            rest = name[len(space) :]
            return struct.pack("<HH", number, len(rest)) + rest + struct.pack("<I", len(value)) + value
    raise ValueError(name)


def _number(root: Inode) -> int:
    """Number all inodes, those of one folder in a row, count their names, and return how many there are."""
    count = 1
    root.number, root.parent, root.links = 1, 2, 2
    stack = [root]
    while stack:
        folder = stack.pop()
        children = folder.content
        assert isinstance(children, dict)
        folders: list[Inode] = []
        for name in sorted(children):
            child = children[name]
            child.links += 1
            if child.number == 0:
                count += 1
                child.number = count
            if child.kind == FOLDER:
                child.links = 2
                child.parent = folder.number
                folders.append(child)
        folder.links += len(folders)
        stack += reversed(folders)
    root.parent = count + 1
    return count


def _inodes(root: Inode, ids: _Ids, xattrs: _Xattrs, compressor: Compressor) -> tuple[_Table, _Table, list[int]]:
    """Inode table and directory table, children before their folder, and all references by inode number."""
    inodes, listings = _Table(compressor), _Table(compressor)
    order: list[Inode] = []
    stack = [root]
    while stack:
        folder = stack.pop()
        order.append(folder)
        children = folder.content
        assert isinstance(children, dict)
        stack += [child for _, child in sorted(children.items()) if child.kind == FOLDER]
    refs: dict[int, int] = {}
    for folder in reversed(order):
        assert isinstance(folder.content, dict)
        names = sorted(folder.content.items())
        for _, child in names:
            if child.ref is None:
                child.ref = inodes.place
                inodes.add(_inode(child, ids, xattrs))
                refs[child.number] = _ref(child)
        place = listings.place
        size, index = _list(listings, names)
        folder.ref = inodes.place
        inodes.add(_folder(folder, place, size, index, ids, xattrs))
        refs[folder.number] = _ref(folder)
    return inodes, listings, [refs[number] for number in range(1, len(refs) + 1)]


def _ref(inode: Inode) -> int:
    assert inode.ref is not None
    return inode.ref[0] << 16 | inode.ref[1]


def _head(kind: int, inode: Inode, ids: _Ids) -> bytes:
    return struct.pack(
        "<HHHHII", kind, inode.mode, ids.place(inode.uid), ids.place(inode.gid), inode.mtime, inode.number
    )


def _inode(inode: Inode, ids: _Ids, xattrs: _Xattrs) -> bytes:
    kind, content = inode.kind, inode.content
    extended = xattrs.place(inode.xattrs)
    if isinstance(content, FileData):
        return _file(inode, content, extended, ids)
    head = _head(kind if extended == NONE else kind + EXTENDED, inode, ids)
    tail = b"" if extended == NONE else struct.pack("<I", extended)
    if isinstance(content, bytes):
        return head + struct.pack("<II", inode.links, len(content)) + content + tail
    assert isinstance(content, int)
    return head + struct.pack("<I", inode.links) + (struct.pack("<I", content) if kind != FIFO else b"") + tail


def _file(inode: Inode, data: FileData, xattr: int, ids: _Ids) -> bytes:
    fragment = data.fragment if data.fragment >= 0 else NONE
    sizes = struct.pack(f"<{len(data.sizes)}I", *data.sizes)
    small = data.size < 1 << 32 and data.start < 1 << 32
    if small and xattr == NONE and inode.links == 1 and not data.sparse:
        words = struct.pack("<IIII", data.start, fragment, data.offset, data.size)
        return _head(FILE, inode, ids) + words + sizes
    sparse = min(data.sparse, data.size - 1) if data.sparse else 0  # the kernel's driver takes it from the size
    words = struct.pack("<QQQIIII", data.start, data.size, sparse, inode.links, fragment, data.offset, xattr)
    return _head(FILE + EXTENDED, inode, ids) + words + sizes


def _folder(
    folder: Inode,
    place: tuple[int, int],
    size: int,
    index: list[tuple[int, int, bytes]],
    ids: _Ids,
    xattrs: _Xattrs,
) -> bytes:
    block, offset = place
    xattr = xattrs.place(folder.xattrs)
    size += 3  # as if `.` and `..` were listed
    if xattr == NONE and not index and size <= 0xFFFF:
        words = struct.pack("<IIHHI", block, folder.links, size, offset, folder.parent)
        return _head(FOLDER, folder, ids) + words
    index = index[:0xFFFF]
    words = struct.pack("<IIIIHHI", folder.links, size, block, folder.parent, len(index), offset, xattr)
    entries = [struct.pack("<III", at, start, len(name) - 1) + name for at, start, name in index]
    return _head(FOLDER + EXTENDED, folder, ids) + words + b"".join(entries)


def _list(listings: _Table, names: list[tuple[bytes, Inode]]) -> tuple[int, list[tuple[int, int, bytes]]]:
    """Write a folder's listing; its size, and where in it to begin looking for a name: offset, block, first name."""
    size = 0
    index: list[tuple[int, int, bytes]] = []
    last_block = listings.place[0]
    at = 0
    while at < len(names):
        first = names[at][1]
        assert first.ref is not None
        start, base = first.ref[0], first.number
        run: list[bytes] = []
        block = listings.place[0]
        if block != last_block:
            index.append((size, block, names[at][0]))
            last_block = block
        length = 12
        while at < len(names) and len(run) < MAX_LISTED:
            name, inode = names[at]
            assert inode.ref is not None
            if inode.ref[0] != start or not -32768 <= inode.number - base <= 32767:
                break
            entry = struct.pack("<HhHH", inode.ref[1], inode.number - base, inode.kind, len(name) - 1) + name
            run.append(entry)
            length += len(entry)
            at += 1
        listings.add(struct.pack("<III", len(run) - 1, start, base) + b"".join(run))
        size += length
    return size, index


def _fragment(fragment: Fragment) -> bytes:
    assert fragment.word & (RAW - 1)
    return struct.pack("<QII", fragment.start, fragment.word, 0)

"""Read a squashfs back, by the format's description rather than by what wrote it."""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqsh.compress import IDS, Compressor
from sqsh.errors import BadImage

FOLDERS, FILES, SYMLINKS, DEVICES = (1, 8), (2, 9), (3, 10), (4, 5, 11, 12)
NONE = 0xFFFFFFFF
NO_TABLE = 0xFFFFFFFFFFFFFFFF
STORED = 0x8000
RAW = 1 << 24
XATTR_SPACES = {0: b"user.", 1: b"trusted.", 2: b"security."}


@dataclass(frozen=True)
class Entry:
    """One inode as it is stored; `kind` is that of the basic form, `content` a digest, a target or a device."""

    number: int
    kind: int
    mode: int
    uid: int
    gid: int
    mtime: int
    links: int
    size: int
    content: bytes | int
    xattrs: tuple[tuple[bytes, bytes], ...]


class Squashfs:
    """A squashfs file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._data = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        fields = struct.unpack_from("<5I6H8Q", self._data)
        magic, _, _, self.block_size, fragments, number, _, _, ids, major, _ = fields[:11]
        self._root, _, id_start, xattr_start, self._inodes, self._listings, fragment_start, _ = fields[11:]
        if magic != 0x73717368 or major != 4:
            raise BadImage(f"{path} is no squashfs")
        name = next((name for name, known in IDS.items() if known == number), "")
        self._compressor = Compressor(name, None, self.block_size)
        self._blocks: dict[int, tuple[bytes, int]] = {}
        self._ids = struct.unpack(f"<{ids}I", self._table(id_start, ids * 4))
        self._fragments = self._table(fragment_start, fragments * 16)
        self._fragment: tuple[int, bytes] = (-1, b"")
        self._xattrs = xattr_start

    def close(self) -> None:
        self._data.close()
        self._file.close()

    def walk(self) -> Iterator[tuple[bytes, Entry]]:
        """Every entry with its path, the root's empty; folders before what lies in them."""
        stack = [(b"", self._root)]
        while stack:
            path, ref = stack.pop()
            entry, listing = self._entry(ref)
            yield path, entry
            if listing is not None:
                stack += [(path + b"/" + name if path else name, child) for name, child in self._list(*listing)]

    def _entry(self, ref: int) -> tuple[Entry, tuple[int, int, int] | None]:
        inode = _Cursor(self, self._inodes + (ref >> 16), ref & 0xFFFF)
        kind, mode, uid, gid, mtime, number = inode.take("<HHHHII")
        basic = kind - 7 if kind > 7 else kind
        links, size, xattr, content, listing = 1, 0, NONE, b"", None
        device = 0
        if kind == 1:
            block, links, length, offset, _ = inode.take("<IIHHI")
            listing = (block, offset, length - 3)
        elif kind == 8:
            links, length, block, _, _, offset, xattr = inode.take("<IIIIHHI")
            listing = (block, offset, length - 3)
        elif kind in FILES:
            if kind == 2:
                start, fragment, offset, size = inode.take("<IIII")
            else:
                start, size, _, links, fragment, offset, xattr = inode.take("<QQQIIII")
            count = size // self.block_size if fragment != NONE else -(-size // self.block_size)
            content = self._digest(start, inode.take(f"<{count}I"), fragment, offset, size)
        elif kind in SYMLINKS:
            links, length = inode.take("<II")
            content = inode.bytes(length)
            xattr = inode.take("<I")[0] if kind == 10 else NONE
        elif kind in DEVICES:
            links, device = inode.take("<II")
            xattr = inode.take("<I")[0] if kind > 7 else NONE
        else:
            (links,) = inode.take("<I")
            xattr = inode.take("<I")[0] if kind > 7 else NONE
        value = device if kind in DEVICES else content
        entry = Entry(
            number, basic, mode, self._ids[uid], self._ids[gid], mtime, links, size, value, self._attributes(xattr)
        )
        return entry, listing

    def _list(self, block: int, offset: int, length: int) -> Iterator[tuple[bytes, int]]:
        cursor = _Cursor(self, self._listings + block, offset)
        while length > 0:
            count, start, _ = cursor.take("<III")
            length -= 12
            for _ in range(count + 1):
                place, _, _, size = cursor.take("<HhHH")
                yield cursor.bytes(size + 1), start << 16 | place
                length -= 8 + size + 1

    def _digest(self, start: int, sizes: tuple[int, ...], fragment: int, offset: int, size: int) -> bytes:
        content = hashlib.sha256()
        left = size
        for word in sizes:
            length = min(left, self.block_size)
            stored = word & (RAW - 1)
            data = self._data[start : start + stored]
            if stored == 0:
                data = bytes(length)
            elif not word & RAW:
                data = self._compressor.unpack(data)
            if len(data) != length:
                raise BadImage(f"a block of {len(data)} bytes where {length} should be")
            content.update(data)
            start += stored
            left -= length
        if fragment != NONE:
            content.update(self._fragment_data(fragment)[offset : offset + left])
        return content.digest()

    def _fragment_data(self, number: int) -> bytes:
        if self._fragment[0] != number:
            start, word, _ = struct.unpack_from("<QII", self._fragments, number * 16)
            data = self._data[start : start + (word & (RAW - 1))]
            self._fragment = (number, data if word & RAW else self._compressor.unpack(data))
        return self._fragment[1]

    def _attributes(self, number: int) -> tuple[tuple[bytes, bytes], ...]:
        if number == NONE or self._xattrs == NO_TABLE:
            return ()
        values, count, _ = struct.unpack_from("<QII", self._data, self._xattrs)
        table = self._table(self._xattrs + 16, count * 16)
        ref, pairs, _ = struct.unpack_from("<QII", table, number * 16)
        cursor = _Cursor(self, values + (ref >> 16), ref & 0xFFFF)
        found = []
        for _ in range(pairs):
            space, size = cursor.take("<HH")
            name = XATTR_SPACES[space] + cursor.bytes(size)
            found.append((name, cursor.bytes(cursor.take("<I")[0])))
        return tuple(found)

    def _table(self, index: int, size: int) -> bytes:
        """A table whose block starts are listed at `index`."""
        count = -(-size // 8192)
        starts = struct.unpack_from(f"<{count}Q", self._data, index) if count else ()
        return b"".join(self.block(start)[0] for start in starts)[:size]

    def block(self, start: int) -> tuple[bytes, int]:
        """A table block's content and where the next one begins."""
        if start not in self._blocks:
            (head,) = struct.unpack_from("<H", self._data, start)
            end = start + 2 + (head & (STORED - 1))
            data = self._data[start + 2 : end]
            self._blocks[start] = (data if head & STORED else self._compressor.unpack(data), end)
        return self._blocks[start]


class _Cursor:
    """Reads on through table blocks."""

    def __init__(self, squashfs: Squashfs, start: int, offset: int) -> None:
        self._squashfs = squashfs
        self._block, self._next = squashfs.block(start)
        self._at = offset

    def take(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))

    def bytes(self, size: int) -> bytes:
        while len(self._block) < self._at + size:
            more, self._next = self._squashfs.block(self._next)
            self._block = self._block[self._at :] + more
            self._at = 0
        data = self._block[self._at : self._at + size]
        self._at += size
        return data

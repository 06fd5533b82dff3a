"""Members of a layer's tar: v7, ustar, GNU (long names, sparse files) and PAX (with its sparse formats and xattrs)."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import NoReturn
from urllib.parse import unquote_to_bytes

from sqsh.errors import BadImage
from sqsh.stream import LayerStream

BLOCK = 512
HEADER = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12x")
ZEROS = bytes(BLOCK)

FILE, LINK, SYMLINK, CHAR, BLOCK_DEVICE, FOLDER, FIFO = range(7)
KINDS = {
    b"0": FILE, b"\0": FILE, b"7": FILE, b"S": FILE,
    b"1": LINK, b"2": SYMLINK, b"3": CHAR, b"4": BLOCK_DEVICE, b"5": FOLDER, b"6": FIFO,
}  # fmt: skip

MAX_EXTENSION = 8 << 20  # a PAX record set or a GNU long name; Linux limits one xattr to 64 kB
MAX_PATH = 4095
MAX_NAME = 255
MAX_FILE = 1 << 40
MAX_HOLES = 1 << 20
TEXTS = (b"path", b"linkpath", b"uname", b"gname", b"GNU.sparse.name")
XATTR_SPACES = (b"user.", b"trusted.", b"security.")
XATTRS_LEFT_OUT = (b"trusted.overlay.", b"user.overlay.", b"security.selinux")


class Member:
    """One entry of a layer. `pieces` are a sparse file's parts that hold data: offset and length in the file."""

    __slots__ = ("device", "gid", "kind", "link", "mode", "mtime", "path", "pieces", "size", "target", "uid", "xattrs")

    def __init__(self, path: tuple[bytes, ...], kind: int, mode: int, uid: int, gid: int, mtime: int) -> None:
        self.path = path
        self.kind = kind
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.mtime = mtime
        self.size = 0
        self.link = b""  # a symbolic link's target
        self.target: tuple[bytes, ...] = ()  # the path that a hard link names
        self.device = (0, 0)
        self.xattrs: tuple[tuple[bytes, bytes], ...] = ()
        self.pieces: list[tuple[int, int]] | None = None


class TarReader:
    """Reads members one by one; what is not read of a member's data is passed over."""

    def __init__(self, stream: LayerStream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._chunk = b""
        self._at = 0
        self._left = 0  # of the current member's data, as stored
        self._padding = 0
        self._global: dict[bytes, bytes] = {}

    def members(self) -> Iterator[Member]:
        """All members in order; at the end the stream is read out, which proves its digest."""
        while (member := self._next()) is not None:
            yield member
        while self._stream.chunk():
            pass

    def read(self, size: int) -> bytes | memoryview:
        """Exactly `size` bytes of the current member's stored data."""
        self._left -= size
        return self._take(size)

    def data(self, member: Member, block_size: int) -> Iterator[bytes | memoryview]:
        """The current file's content in blocks; all but the last are of `block_size`. Holes are zeros."""
        if member.pieces is None:
            left = member.size
            while left > 0:
                size = min(left, block_size)
                yield self.read(size)
                left -= size
        else:
            yield from self._sparse(member.size, member.pieces, block_size)

    def _sparse(self, size: int, pieces: list[tuple[int, int]], block_size: int) -> Iterator[bytes]:
        hole = bytes(block_size)
        rest = iter(pieces)
        offset, length = next(rest, (size, 0))
        for start in range(0, size, block_size):
            end = min(start + block_size, size)
            if offset >= end:
                yield hole if end - start == block_size else bytes(end - start)
                continue
            block = bytearray(end - start)
            while offset < end:
                count = min(offset + length, end) - offset
                block[offset - start : offset - start + count] = self.read(count)
                offset, length = offset + count, length - count
                if length == 0:
                    offset, length = next(rest, (size, 0))
            yield bytes(block)

    def _next(self) -> Member | None:
        long_name: bytes | None = None
        long_link: bytes | None = None
        pax: dict[bytes, bytes] = self._global
        while True:
            self._skip(self._left + self._padding, self._padding)
            self._left = self._padding = 0
            header = self._header()
            if header is None:
                if not self._chunk and (pax is not self._global or long_name is not None or long_link is not None):
                    self._cut()  # what was announced does not come
                return None
            fields = HEADER.unpack(header)
            self._check(header, fields[6])
            kind = fields[7]
            size = self._number(fields[4])
            if kind in b"xgLK":
                if size > MAX_EXTENSION:
                    self._bad(f"has an extended header of {size} bytes")
                body = bytes(self._take(size))
                self._skip(-size % BLOCK)
                if kind == b"L":
                    long_name = body.split(b"\0", 1)[0]
                elif kind == b"K":
                    long_link = body.split(b"\0", 1)[0]
                elif kind == b"g":
                    self._global = {**self._global, **self._records(body)}
                    pax = {**self._global, **pax}
                else:
                    pax = {**self._global, **self._records(body)}
                continue
            return self._member(fields, kind, size, pax, long_name, long_link)

    def _member(
        self,
        fields: tuple[bytes, ...],
        flag: bytes,
        size: int,
        pax: dict[bytes, bytes],
        long_name: bytes | None,
        long_link: bytes | None,
    ) -> Member:
        name = _text(fields[0])
        if fields[9] == b"ustar\0" and fields[15][0]:
            name = _text(fields[15]) + b"/" + name
        name = long_name if long_name is not None else name
        link = long_link if long_link is not None else _text(fields[8])
        kind = KINDS.get(flag)
        if kind is None:
            self._bad(f"has an entry of the unknown type {flag!r}")
        uid, gid, mtime = self._number(fields[2]), self._number(fields[3]), self._number(fields[5])
        sparse: dict[bytes, bytes] = {}
        xattrs: tuple[tuple[bytes, bytes], ...] = ()
        if pax:
            sparse = {key: value for key, value in pax.items() if key.startswith(b"GNU.sparse.")}
            name = sparse.get(b"GNU.sparse.name") or pax.get(b"path", name)
            link = pax.get(b"linkpath", link)
            size = self._decimal(pax[b"size"]) if b"size" in pax else size
            uid = self._decimal(pax[b"uid"]) if b"uid" in pax else uid
            gid = self._decimal(pax[b"gid"]) if b"gid" in pax else gid
            mtime = self._seconds(pax[b"mtime"]) if b"mtime" in pax else mtime
            xattrs = self._xattrs(pax)
        if flag == b"\0" and name.endswith(b"/"):
            kind = FOLDER  # v7's way to say so, and not ustar's: there it is a file, whose content follows
        member = Member(
            self._path(name), kind, self._number(fields[1]) & 0o7777, uid, gid, min(max(mtime, 0), 0xFFFFFFFF)
        )
        if not (0 <= uid < 1 << 32 and 0 <= gid < 1 << 32):
            self._bad(f"has an owner that Linux does not know at {name!r}")
        member.xattrs = xattrs
        if kind == FILE:
            if not 0 <= size <= MAX_FILE:
                self._bad(f"has a file of {size} bytes: {name!r}")
            self._left, self._padding, member.size = size, -size % BLOCK, size
            if flag == b"S":
                self._gnu_sparse(member, fields)
            elif sparse:
                self._pax_sparse(member, sparse)
        elif kind in (LINK, SYMLINK):
            # whatever size the header states, no data follows
            if kind == LINK:
                member.target = self._path(link)
            else:
                member.link = link
            if kind == SYMLINK and not 0 < len(link) <= MAX_PATH:
                self._bad(f"has a symbolic link with a target of {len(link)} bytes at {name!r}")
        elif kind in (CHAR, BLOCK_DEVICE):
            member.device = (self._number(fields[13]), self._number(fields[14]))
            if not (0 <= member.device[0] < 1 << 12 and 0 <= member.device[1] < 1 << 20):
                self._bad(f"has an impossible device at {name!r}")
        return member

    def _path(self, name: bytes) -> tuple[bytes, ...]:
        if len(name) > MAX_PATH:
            self._bad(f"has a path of {len(name)} bytes")
        parts = name.split(b"/")
        if b"" in parts or b"." in parts:  # absolute ones count from the image's root
            parts = [part for part in parts if part not in (b"", b".")]
        if b".." in parts:
            parts = self._resolved(parts, name)
        if b"\0" in name or (len(name) > MAX_NAME and max(map(len, parts), default=0) > MAX_NAME):
            self._bad(f"has a name that Linux does not allow: {name[:300]!r}")
        return tuple(parts)

    def _resolved(self, parts: list[bytes], name: bytes) -> list[bytes]:
        """Without `..`, which must lead to something in the folder that the name begins in."""
        kept: list[bytes] = []
        for part in parts:
            if part != b"..":
                kept.append(part)
            elif not kept:
                self._bad(f"has the path {name!r}, which leaves its folder")
            else:
                kept.pop()
        if not kept:
            self._bad(f"has the path {name!r}, which leaves its folder")
        return kept

    def _xattrs(self, pax: dict[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
        found: dict[bytes, bytes] = {}
        for key, value in pax.items():
            if key.startswith(b"SCHILY.xattr."):
                found[key[13:]] = value
            elif key.startswith(b"LIBARCHIVE.xattr."):
                try:
                    found.setdefault(unquote_to_bytes(key[17:]), base64.b64decode(value + b"=" * (-len(value) % 4)))
                except ValueError:
                    self._bad(f"has an extended attribute that cannot be read: {key!r}")
        kept = {
            key: value
            for key, value in found.items()
            if key.startswith(XATTR_SPACES) and not key.startswith(XATTRS_LEFT_OUT)
        }
        for key, value in kept.items():
            if len(key) > MAX_NAME or len(value) > 65536 or b"\0" in key or key in XATTR_SPACES:
                self._bad(f"has an extended attribute that Linux does not allow: {key[:300]!r}")
        return tuple(sorted(kept.items()))

    def _gnu_sparse(self, member: Member, fields: tuple[bytes, ...]) -> None:
        raw = self._last_header
        stored = member.size
        pieces = self._sparse_fields(raw[386:482])
        more = raw[482]
        member.size = self._number(raw[483:495])
        while more:
            block = bytes(self._take(BLOCK))
            pieces += self._sparse_fields(block[:504])
            more = block[504]
            if len(pieces) > MAX_HOLES:
                self._bad("has a sparse file of too many pieces")
        self._set_pieces(member, pieces, stored)

    def _sparse_fields(self, raw: bytes) -> list[tuple[int, int]]:
        fields = [(raw[at : at + 12], raw[at + 12 : at + 24]) for at in range(0, len(raw) - 23, 24)]
        return [(self._number(offset), self._number(length)) for offset, length in fields if offset[0]]

    def _pax_sparse(self, member: Member, pax: dict[bytes, bytes]) -> None:
        stored = member.size
        size = pax.get(b"GNU.sparse.realsize") or pax.get(b"GNU.sparse.size")
        if size is None:
            self._bad("has a sparse file that does not state its size")
        member.size = self._decimal(size)
        if pax.get(b"GNU.sparse.major") == b"1":
            numbers = self._map_in_data()
            stored = self._left
        else:
            numbers = [self._decimal(text) for text in pax.get(b"GNU.sparse.map", b"").split(b",") if text]
        if len(numbers) % 2:
            self._bad("has a sparse file whose map is cut")
        self._set_pieces(member, list(zip(numbers[::2], numbers[1::2], strict=True)), stored)

    def _map_in_data(self) -> list[int]:
        """Format 1.0: decimal lines before the data, filled up to a block."""
        text = b""
        wanted = 1
        while text.count(b"\n") < wanted:
            if self._left < BLOCK or len(text) > 64 * MAX_HOLES:
                self._bad("has a sparse file whose map is cut")
            text += bytes(self.read(BLOCK))
            if wanted == 1 and b"\n" in text:
                count = self._decimal(text.split(b"\n", 1)[0])
                if count > MAX_HOLES:
                    self._bad("has a sparse file of too many pieces")
                wanted = 1 + 2 * count
        return [self._decimal(line) for line in text.split(b"\n")[1:wanted]]

    def _set_pieces(self, member: Member, pieces: list[tuple[int, int]], stored: int) -> None:
        at = 0
        for offset, length in pieces:
            if offset < at or length < 0 or offset + length > member.size:
                self._bad("has a sparse file whose pieces overlap or lie outside it")
            at = offset + length
        if not 0 <= member.size <= MAX_FILE:
            self._bad(f"has a file of {member.size} bytes")
        if sum(length for _, length in pieces) != stored:
            self._bad("has a sparse file whose map does not fit its data")
        member.pieces = [(offset, length) for offset, length in pieces if length]

    def _records(self, body: bytes) -> dict[bytes, bytes]:
        """PAX records `LENGTH KEY=VALUE\\n`; binary values are allowed."""
        records: dict[bytes, bytes] = {}
        numbers: list[bytes] = []  # sparse format 0.0 repeats these keys
        at = 0
        while at < len(body) and body[at]:
            space = body.find(b" ", at, at + 20)
            digits = body[at:space]
            if space < 0 or not digits.isdigit():
                self._bad("has a PAX record that cannot be read")
            end = at + int(digits)
            key, equals, value = body[space + 1 : end - 1].partition(b"=")
            if end > len(body) or end <= space + 1 or body[end - 1 : end] != b"\n" or not equals or not key:
                self._bad("has a PAX record that cannot be read")
            if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
                numbers.append(value)
            elif b"\0" in value and key in TEXTS:
                self._bad("has a PAX record with a NUL character")
            else:
                records[key] = value
            at = end
        if numbers:
            records[b"GNU.sparse.map"] = b",".join(numbers)
        return {key: value for key, value in records.items() if value or key.startswith(b"SCHILY.")}

    def _header(self) -> bytes | None:
        """The next one; None at the end. The end's mark may be cut or missing: the digest says that this is all."""
        header = self._chunk[self._at : self._at + BLOCK]
        self._at += len(header)
        while len(header) < BLOCK:
            self._chunk = self._stream.chunk()
            if not self._chunk and header.strip(b"\0"):
                self._cut()
            if not self._chunk:
                self._at = 0
                return None
            self._at = min(BLOCK - len(header), len(self._chunk))
            header += self._chunk[: self._at]
        if header == ZEROS:
            return None
        self._last_header = header
        return header

    def _check(self, header: bytes, stored: bytes) -> None:
        wanted = self._number(stored)
        rest = header[:148] + b"        " + header[156:]
        if sum(rest) != wanted and sum(struct.unpack("512b", rest)) != wanted:
            self._bad("has a header that does not match its check sum")

    def _number(self, field: bytes) -> int:
        """Octal, or base 256 where the first bit is set."""
        if field[0] & 0x80:
            value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
            return value - (1 << (8 * len(field) - 1)) if field[0] & 0x40 else value
        try:
            return int(field.lstrip(b" \0").split(b"\0", 1)[0].strip() or b"0", 8)
        except ValueError:
            self._bad(f"has a header with the number {field!r}")

    def _decimal(self, text: bytes) -> int:
        if not text.isdigit() or len(text) > 20:
            self._bad(f"has a PAX record with the number {text[:40]!r}")
        return int(text)

    def _seconds(self, text: bytes) -> int:
        whole, _, fraction = text.partition(b".")
        sign, digits = (-1, whole[1:]) if whole[:1] == b"-" else (1, whole)
        if fraction and not fraction.isdigit():
            self._bad(f"has the time {text[:40]!r}")
        return sign * self._decimal(digits)

    def _take(self, size: int) -> bytes | memoryview:
        at = self._at
        end = at + size
        if end <= len(self._chunk):
            self._at = end
            if size <= BLOCK:
                return self._chunk[at:end]
            return memoryview(self._chunk)[at:end]
        parts = [memoryview(self._chunk)[at:]]
        missing = size - len(parts[0])
        while missing:
            self._advance()
            part = memoryview(self._chunk)[:missing]
            self._at = len(part)
            missing -= len(part)
            parts.append(part)
        return b"".join(parts)

    def _skip(self, size: int, padding: int = 0) -> None:
        """Pass over `size` bytes, of which the last `padding` may be missing at the end of the layer."""
        left = size - (len(self._chunk) - self._at)
        if left <= 0:
            self._at += size
            return
        while left > 0:
            self._chunk, self._at = self._stream.chunk(), 0
            if not self._chunk:
                if left > padding:
                    self._cut()
                return
            left -= len(self._chunk)
        self._at = len(self._chunk) + left

    def _advance(self) -> None:
        self._chunk = self._stream.chunk()
        self._at = 0
        if not self._chunk:
            self._cut()

    def _cut(self) -> NoReturn:
        self._bad("ends in the middle of an entry: it is cut")

    def _bad(self, what: str) -> NoReturn:
        raise BadImage(f"the layer {self._name} {what}", "it is damaged or hostile; nothing was written")


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]

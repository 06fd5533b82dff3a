"""Decompression of a layer or an archive; the format is detected from its first bytes."""

from __future__ import annotations

import bz2
import lzma
from collections.abc import Callable, Iterator
from typing import IO, Protocol, cast

import zstandard
from isal import igzip_lib

from sqsh.errors import BadImage

READ_SIZE = 1 << 20
CHUNK_SIZE = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
XZ_MAGIC = b"\xfd7zXZ\0"
BZIP2_MAGIC = b"BZh"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a first byte of 0x50 to 0x5f
ZSTD_MAX_WINDOW = 128 << 20
XZ_MAX_MEMORY = 128 << 20  # xz -9 needs 65 MB
GZIP_ERRORS = cast(tuple[type[Exception], ...], (igzip_lib.IsalError, EOFError))  # its stub calls it an instance


class Reader(Protocol):
    def read(self, size: int = READ_SIZE) -> bytes: ...


class _Decompressor(Protocol):
    """What gzip, xz and bzip2 have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


def is_packed(head: bytes) -> bool:
    return head.startswith((GZIP_MAGIC, XZ_MAGIC, BZIP2_MAGIC)) or _is_zstd(head)


def unpacked(packed: Reader, head: bytes, name: str) -> Iterator[bytes]:
    """The content in chunks of at most CHUNK_SIZE, whatever the compression of what follows `head`, which may be none.

    Raises BadImage where the compressed stream is damaged or ends in its middle; `name` is what it is called.
    """
    if head.startswith(GZIP_MAGIC):
        yield from _streams(packed, head, f"{name} is no valid gzip", _gzip, GZIP_ERRORS)
    elif head.startswith(XZ_MAGIC):
        yield from _streams(packed, head, f"{name} is no valid xz", _xz, (lzma.LZMAError, EOFError))
    elif head.startswith(BZIP2_MAGIC):
        yield from _streams(packed, head, f"{name} is no valid bzip2", bz2.BZ2Decompressor, (OSError, EOFError))
    elif _is_zstd(head):
        yield from _unzstd(packed, head, f"{name} is no valid zstd")
    else:
        while head:
            yield head
            head = packed.read()


def _is_zstd(head: bytes) -> bool:
    return head.startswith(ZSTD_MAGIC) or (head[1:4] == ZSTD_SKIPPABLE and 0x50 <= head[0] <= 0x5F)


def _gzip() -> _Decompressor:
    return cast(_Decompressor, igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP))


def _xz() -> _Decompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MAX_MEMORY)


def _streams(
    packed: Reader, data: bytes, fault: str, make: Callable[[], _Decompressor], errors: tuple[type[Exception], ...]
) -> Iterator[bytes]:
    """Compressed streams one after the other."""
    while data:
        stream = make()
        while not stream.eof:
            try:
                chunk = stream.decompress(data, CHUNK_SIZE)
            except errors as error:
                raise BadImage(f"{fault} ({error})") from None
            if chunk:
                yield chunk
            data = b""
            if stream.needs_input and not stream.eof and not (data := packed.read()):
                raise BadImage(f"{fault}: it ends in the middle")
        data = stream.unused_data or packed.read()
        while make is _xz and data.startswith(b"\0"):  # padding
            data = data.lstrip(b"\0") or packed.read()


def _unzstd(packed: Reader, head: bytes, fault: str) -> Iterator[bytes]:
    """Frames one after the other; the reader's output is bounded whatever the input claims."""
    source = _Frames(packed, head)
    reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW).stream_reader(
        cast(IO[bytes], source), read_size=READ_SIZE, read_across_frames=True, closefd=False
    )
    while True:
        try:
            chunk = reader.read(CHUNK_SIZE)
        except zstandard.ZstdError as error:
            raise BadImage(f"{fault} ({error})") from None
        if not chunk:
            break
        yield chunk
    if not source.whole:
        raise BadImage(f"{fault}: it ends in the middle")


class _Frames:
    """A zstd stream on its way to zstd's reader, which does not tell whether it ended within a frame: `whole` does.

    It follows the headers of frames and blocks (RFC 8878, section 3.1) and passes over what is between them.
    """

    def __init__(self, packed: Reader, head: bytes) -> None:
        self._packed = packed
        self._first = head
        self._pass = 0  # bytes to pass over
        self._head = b""  # what there is of the next header
        self._size = 5
        self._next: Callable[[bytes], None] = self._frame
        self._check_sum = 0

    @property
    def whole(self) -> bool:
        """Whether what was read so far ends where a frame ends."""
        return self._next == self._frame and not self._pass and not self._head

    def read(self, size: int = READ_SIZE) -> bytes:
        data = self._first or self._packed.read(size)
        self._first = b""
        at = 0
        while at < len(data):
            if self._pass:
                count = min(self._pass, len(data) - at)
                self._pass -= count
                at += count
                continue
            part = data[at : at + self._size - len(self._head)]
            at += len(part)
            self._head += part
            if len(self._head) == self._size:
                head, self._head = self._head, b""
                self._next(head)
        return data

    def _expect(self, size: int, header: Callable[[bytes], None], after: int = 0) -> None:
        self._size, self._next, self._pass = size, header, after

    def _frame(self, head: bytes) -> None:
        if head[1:4] == ZSTD_SKIPPABLE:
            self._expect(3, lambda rest: self._expect(5, self._frame, int.from_bytes(head[4:] + rest, "little")))
            return
        flags = head[4]
        single = flags >> 5 & 1
        content_size = (single, 2, 4, 8)[flags >> 6]
        self._check_sum = 4 * (flags >> 2 & 1)
        self._expect(3, self._block, (1 - single) + (0, 1, 2, 4)[flags & 3] + content_size)

    def _block(self, head: bytes) -> None:
        word = int.from_bytes(head, "little")
        repeated = word >> 1 & 3 == 1
        size = 1 if repeated else word >> 3
        if word & 1:
            self._expect(5, self._frame, size + self._check_sum)
        else:
            self._expect(3, self._block, size)

"""Compressors that squashfs defines and this converter supports."""

from __future__ import annotations

import lzma
import struct
import threading
import zlib
from collections.abc import Sequence

import zstandard

from sqsh.errors import UsageError

Block = bytes | memoryview

DEFAULT_LEVEL = {"zstd": 1, "gzip": 6, "xz": 6}
LEVELS = {"zstd": range(1, 23), "gzip": range(1, 10), "xz": range(0, 10)}
IDS = {"gzip": 1, "xz": 4, "zstd": 6}


class Compressor:
    """One compressor at one level. `number` and `options` are its fields in the squashfs."""

    def __init__(self, name: str, level: int | None, block_size: int) -> None:
        if name not in IDS:
            raise UsageError(f"unknown compressor '{name}'", f"choose {', '.join(IDS)}")
        self.name = name
        self.level = DEFAULT_LEVEL[name] if level is None else level
        if self.level not in LEVELS[name]:
            limits = LEVELS[name]
            raise UsageError(f"{name} has no level {self.level}", f"choose {limits[0]} to {limits[-1]}")
        self.number = IDS[name]
        self.block_size = block_size
        self._own = threading.local()

    @property
    def options(self) -> bytes:
        """Nothing where the reader's defaults hold."""
        if self.name == "zstd" and self.level != 15:
            return struct.pack("<I", self.level)
        if self.name == "gzip" and self.level != 9:
            return struct.pack("<IHH", self.level, 15, 0)
        return b""

    @property
    def version(self) -> str:
        """The library whose version decides the bytes."""
        if self.name == "zstd":
            return "zstd " + ".".join(map(str, zstandard.ZSTD_VERSION))
        if self.name == "gzip":
            return f"zlib {zlib.ZLIB_RUNTIME_VERSION}"
        return "liblzma"

    def pack(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Each block compressed. With zstd all of them in one call that leaves the interpreter to other threads."""
        if self.name == "zstd":
            if not hasattr(self._own, "zstd"):
                self._own.zstd = zstandard.ZstdCompressor(level=self.level)
            return [memoryview(packed) for packed in self._own.zstd.multi_compress_to_buffer(blocks)]
        if self.name == "gzip":
            return [zlib.compress(block, self.level) for block in blocks]
        filters = [{"id": lzma.FILTER_LZMA2, "preset": self.level, "dict_size": max(self.block_size, 8192)}]
        return [lzma.compress(block, lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=filters) for block in blocks]

    def unpack(self, data: bytes) -> bytes:
        limit = max(self.block_size, 8192)
        if self.name == "zstd":
            return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit)
        if self.name == "gzip":
            return zlib.decompressobj().decompress(data, limit)
        return lzma.LZMADecompressor().decompress(data, limit)

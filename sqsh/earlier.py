"""Earlier outputs, whose blocks can be copied instead of made."""

from __future__ import annotations

from collections.abc import Mapping

from isal import isal_zlib

from sqsh.compress import Compressor
from sqsh.copier import Changed, read_earlier
from sqsh.file_data import RAW, Fragment


class Earlier:
    """An earlier output, open as long as the cache that found it is; see cache.py."""

    def __init__(self, handle: int, compressor: Compressor, fragments: Mapping[int, Fragment]) -> None:
        self.handle = handle
        self.fragments = fragments
        self._compressor = compressor
        self._last: tuple[int, bytes] = (-1, b"")

    def fragment(self, number: int) -> bytes:
        """A fragment's content."""
        if self._last[0] != number:
            old = self.fragments[number]
            data = bytearray(old.word & (RAW - 1))
            read_earlier(self.handle, data, old.start)
            if isal_zlib.crc32(data) != old.sum:
                raise Changed
            self._last = (number, bytes(data) if old.word & RAW else self._compressor.unpack(bytes(data)))
        return self._last[1]

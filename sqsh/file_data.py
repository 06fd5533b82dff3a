"""Where the content of files lies in a squashfs."""

from __future__ import annotations

from typing import NamedTuple

RAW = 1 << 24  # a block's size with this bit: stored as it is


class FileData:
    """Where a file's content lies. `key` tells equal contents apart from others; `sums` are check sums of
    its blocks as they are stored."""

    __slots__ = ("fragment", "key", "offset", "size", "sizes", "sparse", "start", "sums")

    def __init__(self, size: int) -> None:
        self.size = size
        self.start = 0
        self.sizes: list[int] = []
        self.sums: list[int] = []
        self.sparse = 0
        self.fragment = -1
        self.offset = 0
        self.key = b""

    @property
    def stored(self) -> int:
        return sum(size & (RAW - 1) for size in self.sizes)


class Fragment(NamedTuple):
    """Where it lies, its size word, the check sum of its stored bytes, and the size of its content."""

    start: int
    word: int
    sum: int
    size: int

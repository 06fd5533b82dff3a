"""What earlier outputs can spare a conversion: for each layer, its entries and where an output has their content.

One file a layer and set of options, replaced as a whole, so that two conversions at once and a crash do no harm. Its
first line names the output by path, inode, size and time of change; behind it are the layer's entries, and place and
check sum of every block: what no longer fits is not used. Nothing of an output itself is kept here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import zstandard

from sqsh.compress import Compressor
from sqsh.earlier import Earlier
from sqsh.file_data import FileData, Fragment
from sqsh.tar import FILE, Member
from sqsh.tree import Node

FORMAT = 3
SUFFIX = ".index"
MAX_INDEX = 1 << 30  # unpacked


@dataclass(frozen=True)
class Recorded:
    """A layer as it was taken in; `packed`: its entries as an index holds them, if they came from one."""

    digest: str
    nodes: Sequence[Node]
    packed: bytes | None = None


@dataclass(frozen=True)
class Found:
    """A layer's entries, the content of its files by their number (None: not in the output), and the output."""

    members: list[Member]
    packed: bytes
    data: list[FileData | None]
    earlier: Earlier


class Cache:
    """Indexes in `folder`, of which the least used go when they take more than `limit` bytes."""

    def __init__(self, folder: Path, limit: int, compressor: Compressor) -> None:
        self._folder = folder
        self._limit = limit
        self._compressor = compressor
        self._handles: dict[tuple[int, int], int] = {}

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def find(self, digest: str) -> Found | None:
        path = self._path(digest)
        try:
            head, _, rest = path.read_bytes().partition(b"\n")
            *output, length = json.loads(head)
            handle = self._open(*output)
            if handle is None:
                return None
            packed = rest[:length]
            members = [_member(row) for row in _unpacked(packed)]
            places = _unpacked(rest[length:])
            fragments = {int(number): Fragment(*words) for number, words in places["fragments"].items()}
            data = [_data(place) for place in places["files"]]
            os.utime(path)
        except Exception:  # none, cut, damaged, or of another version: as good as none
            return None
        return Found(members, packed, data, Earlier(handle, self._compressor, fragments))

    def indexes(self, layers: Sequence[Recorded], fragments: Sequence[Fragment]) -> dict[Path, tuple[bytes, bytes]]:
        """What to keep of each layer, its entries and their places, as soon as it is known where everything goes."""
        found: dict[Path, tuple[bytes, bytes]] = {}
        for layer in layers:
            used = sorted({node.data.fragment for node in layer.nodes if node.data and node.data.fragment >= 0})
            places = {
                "fragments": {number: fragments[number] for number in used},
                "files": [_place(node) for node in layer.nodes],
            }
            entries = layer.packed or _packed([_row(node.member) for node in layer.nodes])
            found[self._path(layer.digest)] = (entries, _packed(places))
        return found

    def keep(self, indexes: Mapping[Path, tuple[bytes, bytes]], out: Path, handle: int) -> None:
        """Write the indexes for an output that will get no more changes. A cache that cannot be written is no reason
        to fail."""
        status = os.fstat(handle)
        output = [str(out.absolute()), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path, (entries, places) in indexes.items():
                head = json.dumps([*output, len(entries)]).encode()
                self._write(path, head + b"\n" + entries + places)
            self._evict()

    def _path(self, digest: str) -> Path:
        words = f"{FORMAT} {digest} {self._compressor.name} {self._compressor.level} {self._compressor.version}"
        key = hashlib.sha256(f"{words} {self._compressor.block_size}".encode()).hexdigest()
        return self._folder / f"{key[:32]}{SUFFIX}"

    def _open(self, path: str, device: int, inode: int, size: int, changed: int) -> int | None:
        """The output that an index speaks of, open as long as this is, if it is still the same."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        status = os.fstat(handle)
        known = self._handles.setdefault((status.st_dev, status.st_ino), handle)
        if known != handle:
            os.close(handle)
        same = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) == (device, inode, size, changed)
        return known if same else None

    def _write(self, path: Path, packed: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=SUFFIX)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(packed)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _evict(self) -> None:
        found = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another conversion may be at this too
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size


def _packed(value: Any) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
    return compressor.compress(json.dumps(value, separators=(",", ":")).encode())


def _unpacked(data: bytes) -> Any:
    return json.loads(zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_INDEX))


def _row(member: Member) -> list[Any]:
    """One entry as JSON holds it; bytes as latin-1."""
    return [
        "/".join(part.decode("latin-1") for part in member.path),
        member.kind,
        member.mode,
        member.uid,
        member.gid,
        member.mtime,
        member.size,
        member.link.decode("latin-1"),
        "/".join(part.decode("latin-1") for part in member.target),
        member.device,
        [[key.decode("latin-1"), value.decode("latin-1")] for key, value in member.xattrs],
    ]


def _member(row: list[Any]) -> Member:
    path, kind, mode, uid, gid, mtime, size, link, target, device, xattrs = row
    member = Member(_split(path), kind, mode, uid, gid, mtime)
    member.size = size
    member.device = (device[0], device[1])
    if link:
        member.link = link.encode("latin-1")
    if target:
        member.target = _split(target)
    if xattrs:
        member.xattrs = tuple((key.encode("latin-1"), value.encode("latin-1")) for key, value in xattrs)
    return member


def _split(path: str) -> tuple[bytes, ...]:
    return tuple(path.encode("latin-1").split(b"/")) if path else ()


def _place(node: Node) -> list[Any] | None:
    data = node.data
    if node.member.kind != FILE or data is None:
        return None
    return [data.size, data.fragment, data.offset, data.key.hex(), data.start, data.sizes, data.sums, data.sparse]


def _data(place: list[Any] | None) -> FileData | None:
    if place is None:
        return None
    size, fragment, offset, key, start, sizes, sums, sparse = place
    data = FileData(size)
    data.fragment, data.offset, data.key = fragment, offset, bytes.fromhex(key)
    data.start, data.sizes, data.sums, data.sparse = start, sizes, sums, sparse
    return data

"""An image to a squashfs in one pass: layers top-down, merged, cut into blocks, compressed on all cores."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import glob
import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sqsh import __version__
from sqsh.blocks import DataArea
from sqsh.cache import Cache, Found, Recorded
from sqsh.cancel import Cancel, in_thread
from sqsh.compress import Block, Compressor
from sqsh.copier import Changed
from sqsh.earlier import Earlier
from sqsh.enroot_files import ImageConfig, parse_config, start_files
from sqsh.errors import BadImage, SqshError, UsageError
from sqsh.file_data import FileData
from sqsh.image import find_image
from sqsh.image_json import IMAGE_JSON, image_json
from sqsh.inodes import StartedTree, inode_tree
from sqsh.manifest import Blob, Image
from sqsh.squashfs import Inode, Written, data_start, write_tables
from sqsh.stream import LayerStream, Limits
from sqsh.tar import FILE, TarReader
from sqsh.tree import Layer, Node, Tree

# What file systems answer that know no locks (Lustre, NFS without its daemon) or no sync of folders (FUSE, SMB).
UNKNOWN_CALL = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOTTY)
BLOCK_SIZES = [1 << bits for bits in range(12, 21)]


@dataclass(frozen=True)
class Options:
    """What the bytes depend on, beside the image: the first six. The rest is how to get there."""

    compressor: str = "zstd"
    level: int | None = None
    block_size: int = 1 << 17
    keep_owner: bool = False  # the image's owners instead of root
    plain: bool = False  # the image's tree as it is: no start files, modes and /dev kept
    name: str = ""  # stated in image.json
    platform: str = ""  # chooses the image in an index, such as linux/arm64
    processors: int = 0  # 0: all that this process may use
    cache: Path | None = None  # a folder for indexes of earlier outputs
    cache_size: int = 1 << 30
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[int, int], None] = lambda done, size: None  # packed bytes, from a thread
    note: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Result:
    """What was made. `versions` name what the bytes depend on; `layers_copied` came from an earlier output."""

    out: Path
    digest: str
    media_type: str
    size: int
    inodes: int
    layers: int
    layers_copied: int
    seconds: float
    options: Mapping[str, str]
    versions: Mapping[str, str]


def convert(source: str | Image, out: Path, options: Options | None = None) -> Result:
    """Write the image as a squashfs to `out`, whole or not at all, with no other space on disk.

    Raises BadImage for a damaged or hostile image, UsageError for an invalid request, SqshError otherwise.
    """
    options = options or Options()
    started = time.monotonic()
    if options.block_size not in BLOCK_SIZES:
        raise UsageError(f"no squashfs has blocks of {options.block_size} bytes", "choose 4096 to 1048576, doubling")
    image = find_image(source, options.platform, options.note, options.limits) if isinstance(source, str) else source
    compressor = Compressor(options.compressor, options.level, options.block_size)
    with _quiet_collector():
        try:
            written, copied = in_thread(lambda cancel: _convert(image, out, options, compressor, cancel))
        except Changed:
            options.note("note: an earlier output has changed or cannot be copied: everything is made anew")
            written, copied = in_thread(lambda cancel: _convert(image, out, options, compressor, cancel, look=False))
    return Result(
        out=out,
        digest=image.digest,
        media_type=image.media_type,
        size=written.size,
        inodes=written.inodes,
        layers=len(image.layers),
        layers_copied=copied,
        seconds=time.monotonic() - started,
        options=stated(options),
        versions=versions(options),
    )


def stated(options: Options) -> dict[str, str]:
    """The options that the bytes depend on, as text; the name apart."""
    compressor = Compressor(options.compressor, options.level, options.block_size)
    words = {"compressor": compressor.name, "level": str(compressor.level), "block_size": str(options.block_size)}
    if options.keep_owner:
        words["owner"] = "kept"
    if options.plain:
        words["plain"] = "yes"
    return words


def versions(options: Options) -> dict[str, str]:
    """What the bytes depend on beside the image and the options."""
    return {
        "sqsh": __version__,
        "compressor": Compressor(options.compressor, options.level, options.block_size).version,
    }


def _convert(
    image: Image, out: Path, options: Options, compressor: Compressor, cancel: Cancel, look: bool = True
) -> tuple[Written, int]:
    """`look`: in the cache."""
    config = parse_config(image.config)
    no_cache = contextlib.nullcontext()
    own_cache = Cache(options.cache, options.cache_size, compressor) if options.cache is not None else no_cache
    threads = options.processors or len(os.sched_getaffinity(0))
    output = _Output(out, options.note)
    try:
        with _disk_errors(out), own_cache as cache:
            handle = output.open()
            with DataArea(handle, data_start(compressor), compressor, options.block_size, threads, cancel) as area:
                layers = Layers(image, area, options, cache if look else None, cancel)
                root = final_tree(layers, image, config, options)
                area.finish()
                written = write_tables(handle, area, root, compressor, config.epoch)
                indexes = cache.indexes(layers.recorded, area.fragments) if cache is not None else {}
                area.settle()
            output.finish()
            if cache is not None:
                cache.keep(indexes, out, handle)
    finally:
        output.close()
    return written, layers.copied


def final_tree(layers: Layers, image: Image, config: ImageConfig, options: Options) -> Inode:
    """The whole tree, its files' content taken in by the layers' area."""
    tree = layers.read()
    root = inode_tree(tree.root, config.epoch, keep_owner=options.keep_owner, keep_modes=options.plain)
    if options.plain:
        return root
    started = StartedTree(root, config.epoch, layers.store)
    added = start_files(config)
    for warning in added.warnings:
        options.note(f"note: {warning}")
    for path, text in {**added.contents, IMAGE_JSON: image_json(image, options.name)}.items():
        started.write(path, text.encode(errors="surrogateescape"))
    for path in added.folders:
        started.make_folder(path)
    started.empty("dev")
    return root


class Area(Protocol):
    """Takes in the content of files."""

    block_size: int

    def add(self, size: int, blocks: Iterable[Block]) -> FileData: ...

    def add_earlier(self, old: FileData, earlier: Earlier) -> FileData: ...

    def end_layer(self) -> None: ...


class Layers:
    """An image's layers on their way into a tree, the top one first. `recorded` is what the cache keeps of them."""

    def __init__(self, image: Image, area: Area, options: Options, cache: Cache | None, cancel: Cancel) -> None:
        self._blobs = image.layers[::-1]
        self._area = area
        self._limits = options.limits
        self._cache = cache
        self._cancel = cancel
        self._progress = _Progress(options.progress, image.size)
        self._tree = Tree(cancel.check)
        self.recorded: list[Recorded] = []
        self.copied = 0

    def read(self) -> Tree:
        for number, blob in enumerate(self._blobs):
            layer = self._tree.layer(blob.digest)
            found = self._cache.find(blob.digest) if self._cache is not None else None
            missing = self._stream(blob, layer) if found is None else self._replay(blob, layer, found)
            self._fill(blob, missing.pop(number))
            for above, nodes in sorted(missing.items()):  # what belongs elsewhere than it seemed
                self._fill(self._blobs[above], nodes)
            self._area.end_layer()
            self.recorded.append(Recorded(blob.digest, layer.nodes, found.packed if found is not None else None))
        self._tree.finish()
        return self._tree

    def store(self, content: bytes) -> FileData:
        """Content that is in no layer."""
        size = self._area.block_size
        return self._area.add(len(content), [content[at : at + size] for at in range(0, len(content), size)])

    def _stream(self, blob: Blob, layer: Layer) -> dict[int, list[Node]]:
        """Take a layer in from its stream. What shows but was passed over is returned: it takes a second reading."""
        with self._open(blob, self._progress) as reader:
            for number, member in enumerate(reader.members()):
                self._refuse_more_than(number, blob)
                node = Node(member, number)
                if layer.add(node):
                    node.data = self._area.add(member.size, reader.data(member, self._area.block_size))
        return self._tree.add(layer)

    def _replay(self, blob: Blob, layer: Layer, found: Found) -> dict[int, list[Node]]:
        """Take a layer in from an earlier output, if that has all that shows; what it lacks is returned."""
        self._refuse_more_than(len(found.members) - 1, blob)
        nodes = [Node(member, number) for number, member in enumerate(found.members)]
        files = [member.kind == FILE for member in found.members]
        complete = None not in itertools.compress(found.data, files)
        wanted: list[Node] = []
        for node in nodes:
            if layer.add(node):
                wanted.append(node)
                if complete:
                    self._copy(node, found)
        at_once = {id(node) for node in wanted}
        number = len(self.recorded)
        missing = self._tree.add(layer)
        late = [node for node in missing[number] if id(node) not in at_once]
        if any(found.data[node.number] is None for node in (*wanted, *late)):
            self._fill(blob, wanted)
            return {**missing, number: late}
        for node in late if complete else (*wanted, *late):
            self._copy(node, found)
        self.copied += 1
        self._progress(blob.size)
        return {**missing, number: []}

    def _refuse_more_than(self, number: int, blob: Blob) -> None:
        if number >= self._limits.entries:
            raise BadImage(
                f"the layer {blob.digest} has more than {self._limits.entries} entries", "--max-entries allows more"
            )

    def _copy(self, node: Node, found: Found) -> None:
        data = found.data[node.number]
        assert data is not None
        node.data = self._area.add_earlier(data, found.earlier)

    def _fill(self, blob: Blob, wanted: list[Node]) -> None:
        """Read a layer for the content of some of its files, in their order."""
        by_number = {node.number: node for node in wanted}
        if not by_number:
            return
        with self._open(blob, lambda size: None) as reader:
            for number, member in enumerate(reader.members()):
                if (node := by_number.get(number)) is not None:
                    node.data = self._area.add(member.size, reader.data(member, self._area.block_size))

    @contextmanager
    def _open(self, blob: Blob, progress: Callable[[int], None]) -> Iterator[TarReader]:
        with LayerStream(blob, self._limits, progress, self._cancel) as stream:
            yield TarReader(stream, blob.digest)


class _Progress:
    """Adds up what threads report."""

    def __init__(self, report: Callable[[int, int], None], size: int) -> None:
        self._report = report
        self._size = size
        self._done = 0

    def __call__(self, count: int) -> None:
        self._done += count
        self._report(self._done, self._size)


class _Output:
    """A temporary file beside `out`, which `finish` puts in place; without that `close` removes it.

    It is locked while it is written, so that what a killed conversion has left is told from one at work.
    """

    def __init__(self, out: Path, note: Callable[[str], None]) -> None:
        self._out = out.absolute()
        self._note = note
        self._part = self._out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
        self._handle = -1

    def open(self) -> int:
        for left in self._out.parent.glob(f".{glob.escape(self._out.name)}.*.part"):
            _remove_unlocked(left)
        try:
            self._handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"cannot write to {self._out.parent} ({error.strerror})") from None
        with self._if_known("lock files: what a killed conversion leaves there stays"):
            fcntl.flock(self._handle, fcntl.LOCK_EX)
        if os.fstat(self._handle).st_nlink == 0:  # another conversion took it for a leftover before it was locked
            os.close(self._handle)
            self._handle = -1
            return self.open()
        return self._handle

    def finish(self) -> None:
        with self._if_known("set a file's mode: see who may read it", errno.EPERM):
            os.fchmod(self._handle, 0o644)
        os.fsync(self._handle)
        self._part.replace(self._out)
        with self._if_known("sync folders: a crash of the machine may still undo the file's name", errno.EACCES):
            folder = os.open(self._out.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        self._part.unlink(missing_ok=True)
        if self._handle >= 0:
            os.close(self._handle)

    @contextmanager
    def _if_known(self, what: str, *more: int) -> Iterator[None]:
        """Continue, with a note, where the file system does not support the call in the body."""
        try:
            yield
        except OSError as error:
            if error.errno not in (*UNKNOWN_CALL, *more):
                raise
            self._note(f"note: {self._out.parent} cannot {what} ({error.strerror})")


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SqshError(
                f"no space left on device for {out}", "make room for it; nothing else is written"
            ) from error
        raise SqshError(f"{out} could not be written ({error.strerror or error})") from error


def _remove_unlocked(left: Path) -> None:
    with contextlib.suppress(OSError), left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        left.unlink()


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Hundreds of thousands of objects that all live to the end are not worth looking through again and again."""
    was, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(5e-5)  # what compresses or writes should not wait long for the interpreter
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if was:
            gc.enable()

"""Write files atomically, hash them, and measure space."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from kit.errors import KitError
from kit.steps import say

# Errors of file systems without locks (Lustre, NFS without its daemon) or without fsync of folders (FUSE, SMB).
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOTTY)


def write_atomic(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, and a crash loses neither."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


@contextmanager
def finished_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; renamed to `path` when the body succeeds, removed when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with if_supported(folder, "sync folders: a crash of the machine may still undo a file's name"):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def if_supported(folder: Path, what: str) -> Iterator[None]:
    """Continue, with a note, where the file system does not support the call in the body."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _note_once(f"note: {folder} cannot {what} ({error.strerror})")


@cache
def _note_once(text: str) -> None:
    say(text)


def need_space(folder: Path, size: int, what: str) -> None:
    """Raise KitError unless the disk of `folder` has `size` bytes free: a full disk makes other programs fail too."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < size:
        raise KitError(
            f"{what} needs about {size / 1e9:.0f} GB on the disk of {folder}, and {free / 1e9:.1f} GB are free",
            "make room, or move the state folder with KIT_STATE",
        )


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_size(folder: Path) -> int:
    """Bytes that the files in a folder occupy on disk, hard links counted once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for path in folder.rglob("*"):
        status = path.lstat()
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            total += status.st_blocks * 512
    return total

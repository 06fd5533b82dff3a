"""Change an unpacked image in place, never stepping outside it: its symbolic links count from its own root."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path, PurePosixPath

from kit.errors import KitError

MAX_LINKS = 40


def write_file(root: Path, path: str, data: bytes, mode: int, mtime: int) -> None:
    """Write `path` inside `root`, replacing what is there (never what a link there points to)."""
    place = _make_folder(root, str(PurePosixPath(path).parent), mtime) / PurePosixPath(path).name
    if place.is_dir() and not place.is_symlink():
        raise KitError(f"the image has a folder at /{path}, where a file must go", "rebuild the image without it")
    place.unlink(missing_ok=True)
    place.write_bytes(data)
    place.chmod(mode)
    os.utime(place, (mtime, mtime))


def make_folder(root: Path, path: str, mtime: int) -> None:
    """Make `path` and its parents inside `root`; what exists stays as it is, even if it is no folder."""
    try:
        _make_folder(root, path, mtime)
    except NotADirectoryError:
        return


def empty_folder(root: Path, path: str) -> None:
    """Remove what is in the folder `path`, if that is one."""
    place = root / path
    if place.is_symlink() or not place.is_dir():
        return
    for entry in place.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def open_to_owner(root: Path) -> None:
    """Add u+rX everywhere and u+w to folders, so that a user who owns the tree can read and extend it."""
    for folder, entry in _walk(root):
        mode = stat.S_IMODE(entry.st_mode)
        wanted = mode | stat.S_IRUSR
        if stat.S_ISDIR(entry.st_mode):
            wanted |= stat.S_IRWXU
        elif mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH):
            wanted |= stat.S_IXUSR
        if wanted != mode and not stat.S_ISLNK(entry.st_mode):
            folder.chmod(wanted)


def settle_times(root: Path, since: float, mtime: int) -> None:
    """Give `mtime` to whatever was changed at or after `since`: those times are ours, not the image's."""
    for path, entry in _walk(root):
        if entry.st_mtime >= since:
            os.utime(path, (mtime, mtime), follow_symlinks=False)


def _walk(root: Path) -> list[tuple[Path, os.stat_result]]:
    """Every entry with its status, `root` included; children come before their folder."""
    entries: list[tuple[Path, os.stat_result]] = []
    for folder, folders, files in os.walk(root, topdown=False):
        for name in (*files, *(name for name in folders if Path(folder, name).is_symlink())):
            path = Path(folder, name)
            entries.append((path, path.lstat()))
        entries.append((Path(folder), Path(folder).lstat()))
    return entries


def _make_folder(root: Path, path: str, mtime: int) -> Path:
    """The place of the folder `path` with every link on the way resolved inside `root`; missing ones are made."""
    place = root
    rest = [part for part in PurePosixPath(path).parts if part != "/"]
    links = 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            place = place if place == root else place.parent
            continue
        step = place / part
        if step.is_symlink():
            links += 1
            if links > MAX_LINKS:
                raise KitError(f"the image has a loop of symbolic links at /{path}", "rebuild the image without it")
            target = step.readlink()
            place = root if target.is_absolute() else place
            rest = [part for part in target.parts if part != "/"] + rest
        elif step.is_dir():
            place = step
        else:
            step.mkdir(0o755)
            os.utime(step, (mtime, mtime))
            place = step
    return place

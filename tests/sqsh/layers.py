"""Images written entry by entry, so that a test can say exactly what a layer holds, and trees read back to compare."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from sqsh.convert import Options, Result, convert
from sqsh.image import find_image
from sqsh.reader import Squashfs
from sqsh.verify import verify

EPOCH = 1_700_000_000
OCI = "application/vnd.oci.image"


@dataclass(frozen=True)
class Item:
    """One member of a layer; a plain file unless `type` says otherwise. Names may hold any byte."""

    name: bytes
    data: bytes = b""
    type: bytes = tarfile.REGTYPE
    mode: int = 0o644
    link: bytes = b""
    owner: int = 0
    mtime: int = EPOCH
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    device: tuple[int, int] = (0, 0)


def folder(name: bytes, mode: int = 0o755, **words: Any) -> Item:
    return Item(name, type=tarfile.DIRTYPE, mode=mode, **words)


def symlink(name: bytes, target: bytes) -> Item:
    return Item(name, type=tarfile.SYMTYPE, link=target, mode=0o777)


def hardlink(name: bytes, target: bytes) -> Item:
    return Item(name, type=tarfile.LNKTYPE, link=target)


def tar(items: Sequence[Item], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for item in items:
            info = tarfile.TarInfo(os.fsdecode(item.name))
            info.type, info.mode, info.linkname = item.type, item.mode, os.fsdecode(item.link)
            info.uid = info.gid = item.owner
            info.mtime, info.size = item.mtime, len(item.data)
            info.devmajor, info.devminor = item.device
            info.pax_headers = {
                f"SCHILY.xattr.{key}": value.decode("utf-8", "surrogateescape") for key, value in item.xattrs.items()
            }
            archive.addfile(info, io.BytesIO(item.data))
    return buffer.getvalue()


def packed(data: bytes, how: str) -> bytes:
    if how == "gzip":
        return gzip.compress(data, 1, mtime=0)
    return zstandard.ZstdCompressor(level=1).compress(data) if how == "zstd" else data


def write_image(
    root: Path,
    layers: Sequence[Sequence[Item] | bytes],
    config: Mapping[str, Any] | None = None,
    how: str = "gzip",
    platform: str = "linux/amd64",
) -> str:
    """An OCI layout with one image, `image`, made of items or of ready tars; its digest."""
    blobs = root / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    tars = [layer if isinstance(layer, bytes) else tar(layer) for layer in layers]

    def blob(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    about = {
        "created": "2023-11-14T22:13:20Z",
        **dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False)),
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in tars]},
        "history": [{"created_by": "test"} for _ in tars],
    }
    suffix = "" if how == "tar" else f"+{how}"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": blob(json.dumps(about).encode(), f"{OCI}.config.v1+json"),
        "layers": [blob(packed(data, how), f"{OCI}.layer.v1.tar{suffix}") for data in tars],
    }
    descriptor = blob(json.dumps(manifest).encode(), f"{OCI}.manifest.v1+json")
    descriptor["annotations"] = {"org.opencontainers.image.ref.name": "image"}
    (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [descriptor]}))
    return str(descriptor["digest"])


PLAIN = Options(plain=True, keep_owner=True)


def made(root: Path, layers: Sequence[Sequence[Item] | bytes], options: Options = PLAIN, how: str = "gzip") -> Path:
    """The squashfs of an image of these layers."""
    write_image(root / "oci", layers, how=how)
    return converted(root / "oci", root / "image.sqsh", options).out


def converted(source: Path | str, out: Path, options: Options = PLAIN) -> Result:
    """Convert, and hold the result against the layers by our own reader too."""
    result = convert(str(source), out, options)
    assert verify(find_image(str(source)), out, options) == len(list(Squashfs(out).walk()))
    return result


def unsquashed(squashfs: Path, folder: Path) -> Path:
    words = ["unsquashfs", "-quiet", "-no-progress", "-processors", "1", "-d", str(folder), str(squashfs)]
    subprocess.run(words, check=True, capture_output=True)
    return folder


def tree(root: Path) -> dict[bytes, tuple[Any, ...]]:
    """What is at each path: type and mode, owner, size, content or target, names of the same inode, xattrs."""
    names: dict[tuple[int, int], list[bytes]] = {}
    found: list[tuple[bytes, bytes, os.stat_result]] = []
    top = os.fsencode(root)
    for place, folders, files in os.walk(top):
        for name in [*folders, *files]:
            path = place + b"/" + name
            status = os.lstat(path)
            found.append((path, os.path.relpath(path, top), status))
            if not stat.S_ISDIR(status.st_mode):
                names.setdefault((status.st_dev, status.st_ino), []).append(os.path.relpath(path, top))
    return {
        name: (
            oct(status.st_mode) if not stat.S_ISLNK(status.st_mode) else "link",
            status.st_uid,
            *_content(path, status),
            tuple(sorted(names.get((status.st_dev, status.st_ino), []))),
            _xattrs(path),
        )
        for path, name, status in found
    }


def _content(path: bytes, status: os.stat_result) -> tuple[Any, ...]:
    if stat.S_ISREG(status.st_mode):
        with Path(os.fsdecode(path)).open("rb") as file:
            return status.st_size, hashlib.file_digest(file, "sha256").hexdigest(), int(status.st_mtime)
    if stat.S_ISLNK(status.st_mode):
        return bytes(Path(os.fsdecode(path)).readlink()), int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        return ()
    return status.st_rdev, int(status.st_mtime)


def _xattrs(path: bytes) -> tuple[tuple[str, bytes], ...]:
    keys = sorted(os.listxattr(path, follow_symlinks=False))
    return tuple((key, os.getxattr(path, key, follow_symlinks=False)) for key in keys if key != "security.selinux")

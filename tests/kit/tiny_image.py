"""Tiny OCI layouts made from nothing, with whatever a real image may hold, good or hostile."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSYBOX = Path("/bin/busybox")
OCI = ("application/vnd.oci.image", "application/vnd.oci.image.layer.v1.tar+gzip")
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
MTIME = 1_700_000_000


@dataclass(frozen=True)
class Entry:
    """One member of a layer: a file unless `type` says otherwise."""

    name: str
    data: bytes = b""
    mode: int = 0o644
    type: bytes = tarfile.REGTYPE
    link: str = ""
    owner: int = 0


def folder(name: str, mode: int = 0o755) -> Entry:
    return Entry(name, mode=mode, type=tarfile.DIRTYPE)


def symlink(name: str, target: str) -> Entry:
    return Entry(name, type=tarfile.SYMTYPE, link=target)


def hardlink(name: str, target: str) -> Entry:
    return Entry(name, type=tarfile.LNKTYPE, link=target)


def busybox(*applets: str) -> list[Entry]:
    """A root file system that can run a shell."""
    names = (
        "sh",
        "cat",
        "echo",
        "env",
        "ls",
        "mkdir",
        "sleep",
        "stat",
        "kill",
        "ps",
        "pwd",
        "id",
        "touch",
        "rm",
        *applets,
    )
    links = [symlink(f"bin/{name}", "busybox") for name in sorted(set(names))]
    return [folder("bin"), Entry("bin/busybox", BUSYBOX.read_bytes(), 0o755), *links, folder("tmp", 0o1777)]


def layer(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.mode, info.linkname, info.mtime = entry.type, entry.mode, entry.link, MTIME
            info.uid = info.gid = entry.owner
            info.size = len(entry.data)
            archive.addfile(info, io.BytesIO(entry.data))
    return buffer.getvalue()


def write_layout(
    root: Path, layers: Sequence[Sequence[Entry]], config: Mapping[str, Any] | None = None, *, docker: bool = False
) -> str:
    """Write an OCI layout with one image and return its digest; `docker` uses the media types of the kit's builds."""
    blobs = root / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    tars = [layer(entries) for entries in layers]
    manifest_type = DOCKER_MANIFEST if docker else f"{OCI[0]}.manifest.v1+json"
    image_config = {
        "created": "2023-11-14T22:13:20Z",
        "architecture": "amd64",
        "os": "linux",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]},
        "history": [{"created_by": "test"} for _ in tars],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": manifest_type,
        "config": blob(json.dumps(image_config).encode(), DOCKER_CONFIG if docker else f"{OCI[0]}.config.v1+json"),
        "layers": [
            blob(
                gzip.compress(tar, compresslevel=0 if len(tar) > 10_000_000 else 1, mtime=0),
                DOCKER_LAYER if docker else OCI[1],
            )
            for tar in tars
        ],
    }
    descriptor = blob(json.dumps(manifest).encode(), manifest_type)
    (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [descriptor]}))
    return str(descriptor["digest"])

"""The inputs of an image, and the hash of each.

The host computes these hashes for the record, and the build computes them for /opt/release/build.json from the files it
got: the same code on both sides. The build runs it on the base's Python, which has the standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

SOURCES = (
    "docker",
    "functional",
    "tests/functional/grpo_dynamo.sh",
    ".dockerignore",
    "kit/sources.py",
    "kit/nemo_tree.py",
)
"""What the Dockerfile copies from the repository, besides lockfiles; a change in any of it gives another image."""
LEFT_OUT = ("__pycache__", "build", "*.egg-info", ".*_cache")
"""Build products and caches, which .dockerignore excludes too."""


def input_hashes(tree: Path, environments: Sequence[str], locks: str, inputs: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of everything that goes into an image, by name.

    tree: the repository; environments: trainer, dynamo, nemo-rl; locks: the lockfiles' profile; inputs: inputs.json's
    content. Of NeMo RL's tree the commit, which is a hash too, goes in beside these.
    """
    hashes = {**lock_hashes(tree, [f"{environment}-{locks}" for environment in environments]), **source_hashes(tree)}
    hashes["base"] = inputs.get("base_sha256") or str(inputs["base"]["image"]).rpartition("sha256:")[2]
    return {**hashes, **(inputs.get("archives", {}) if "dynamo" in environments else {})}


def lock_hashes(tree: Path, names: Sequence[str]) -> dict[str, str]:
    return {name: _sha256(tree / "lockfiles" / f"{name}.txt") for name in names}


def source_hashes(tree: Path) -> dict[str, str]:
    return {source: tree_sha256(tree / source) for source in SOURCES}


def tree_sha256(root: Path) -> str:
    """Hash over names, kinds and contents of a file, or of all files below a folder except `LEFT_OUT`.

    Kinds: executable file, other file, symbolic link. Other mode bits depend on the umask of the checkout.
    """
    digest = hashlib.sha256()
    for path in _files(root):
        status = path.lstat()
        if path.is_symlink():
            kind, content = "l", hashlib.sha256(str(path.readlink()).encode()).hexdigest()
        else:
            kind, content = "x" if status.st_mode & 0o100 else "-", _sha256(path)
        digest.update(f"{path.relative_to(root)}\0{kind}\0{content}\n".encode())
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root).parts
        if any(fnmatchcase(part, pattern) for part in inside for pattern in LEFT_OUT):
            continue
        if path.is_file() or path.is_symlink():
            yield path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

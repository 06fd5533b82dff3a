"""SHA256SUMS of a folder, as `sha256sum` writes and checks it: made with the folder, checked when it is used."""

import hashlib
import os
from pathlib import Path

from functional.runtime.errors import ConfigError

SUMS = "SHA256SUMS"
LFS_POINTER = b"version https://git-lfs.github.com/"


def write_sums(folder: Path) -> None:
    """Write the sums of every file in `folder`, and flush them to disk."""
    names = sorted(path.name for path in folder.iterdir() if path.name != SUMS)
    with (folder / SUMS).open("w", encoding="ascii") as file:
        file.writelines(f"{file_sha256(folder / name)}  {name}\n" for name in names)
        file.flush()
        os.fsync(file.fileno())


def check_sums(folder: Path, remedy: str) -> None:
    """Raises ConfigError, with `remedy`, for the first file that is missing or has other bytes than SHA256SUMS says."""
    try:
        lines = (folder / SUMS).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder / SUMS}: cannot be read ({type(error).__name__}): {remedy}") from error
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if "model.safetensors" not in expected:
        raise ConfigError(f"{folder / SUMS}: names no model.safetensors: {remedy}")
    for name, digest in expected.items():
        if problem := _problem(folder / name, digest):
            raise ConfigError(f"{folder / name}: {problem}: {remedy}")


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _problem(path: Path, expected: str) -> str | None:
    try:
        found = file_sha256(path)
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError as error:
        return f"cannot be read ({type(error).__name__})"
    if found == expected:
        return None
    if is_pointer:
        return "a Git LFS pointer stands in its place"
    return f"damaged: sha256 {found[:12]}…, {SUMS} says {expected[:12]}…"

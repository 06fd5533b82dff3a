"""Compare compressors, levels and block sizes on one image: size, conversion time, reading speed."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measure import best, measure, words

CHOICES = [
    ("zstd", 1, 128), ("zstd", 1, 256), ("zstd", 1, 1024), ("zstd", 2, 128), ("zstd", 3, 128), ("zstd", 3, 1024),
    ("zstd", 6, 128), ("gzip", 1, 128),
]  # fmt: skip
RANDOM_READS = 3000


@dataclass(frozen=True)
class Choice:
    """One choice's figures: a size in bytes, seconds, and reads a second."""

    compressor: str
    level: int
    block_kb: int
    size: int
    wall_s: float
    cpu_s: float
    read_s: float
    reads_per_s: float


def compare(sqsh: list[str], image: Path, out: Path, rounds: int) -> list[Choice]:
    """Convert with each choice, then read the mounted result, after its pages are dropped from the cache."""
    found = []
    for compressor, level, block in CHOICES:
        options = ["--compressor", compressor, "--level", str(level), "--block-size", f"{block}K"]
        convert = [words(*sqsh, image, out, *options, "--no-cache", "--quiet")]
        rows = []
        for _ in range(rounds):
            warm(image)
            rows.append(measure(" ".join(options[1::2]), convert, out, keep=True))
        (row,) = best(rows)
        with _mounted(out) as place:
            everything = _read_all(place)
            files = [path for path in place.rglob("*.so*") if path.is_file() and not path.is_symlink()]
            _drop_from_page_cache(out)
            at_random = _read_at_random(files)
        found.append(Choice(compressor, level, block, row.size, row.wall_s, row.cpu_s, everything, at_random))
        out.unlink()
    return found


def warm(image: Path) -> None:
    """Load an OCI layout's blobs into the page cache."""
    for path in (image / "blobs/sha256").iterdir():
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass


@contextmanager
def _mounted(squashfs: Path) -> Iterator[Path]:
    _drop_from_page_cache(squashfs)
    place = squashfs.with_suffix(".mount")
    place.mkdir()
    try:
        subprocess.run(["mount", "-o", "loop,ro", squashfs, place], check=True)
        yield place
    finally:
        subprocess.run(["umount", place], check=False)
        place.rmdir()


def _drop_from_page_cache(squashfs: Path) -> None:
    """Remove the file, and what was read through its mounts, from the page cache."""
    handle = os.open(squashfs, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    Path("/proc/sys/vm/drop_caches").write_text("1\n")


def _read_all(place: Path) -> float:
    """Seconds to read all files, two at a time."""
    started = time.monotonic()
    subprocess.run(f"find {place} -type f -print0 | xargs -0 -n 64 -P 2 cat >/dev/null", shell=True, check=True)
    return time.monotonic() - started


def _read_at_random(files: list[Path]) -> float:
    """Reads per second: 4 kB at random offsets of the libraries, one after the other, as when a program starts."""
    chance = random.Random(1)
    sizes = [path.stat().st_size for path in files]
    chosen = chance.choices(files, weights=sizes, k=RANDOM_READS)
    started = time.monotonic()
    for path in chosen:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(handle, 4096, chance.randrange(max(1, os.fstat(handle).st_size - 4096)))
        os.close(handle)
    return RANDOM_READS / (time.monotonic() - started)


def table(choices: list[Choice]) -> str:
    lines = [
        "| compressor | level | block kB | size GB | conversion s | CPU s | read all s | random 4 kB reads a second |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {choice.compressor} | {choice.level} | {choice.block_kb} | {choice.size / 1e9:.3f} | {choice.wall_s:.1f} | "
        f"{choice.cpu_s:.1f} | {choice.read_s:.1f} | {choice.reads_per_s:.0f} |"
        for choice in choices
    ]
    return "\n".join(lines)

"""`sqsh IMAGE OUT`: the converter's own command line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sqsh import __version__
from sqsh.compress import IDS
from sqsh.convert import Options, Result, convert
from sqsh.errors import SqshError, UsageError
from sqsh.image import find_image
from sqsh.reference import parse_reference
from sqsh.stream import Limits
from sqsh.verify import verify

UNITS = {"": 1, "k": 1000, "K": 1024, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def main(words: Sequence[str] | None = None) -> int:
    if sys.stderr is None:  # closed by the caller
        with Path(os.devnull).open("w") as sys.stderr:
            return main(words)
    arguments = _parser().parse_args(words)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if arguments.engine == "enroot":
            return _enroot(arguments)
        result = _convert(arguments)
    except SqshError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("error: interrupted; nothing is half-written", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({**asdict(result), "out": str(result.out)}, indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sqsh",
        description="Turn a container image into a squashfs that enroot and pyxis start, in one stream.",
        epilog="Examples: sqsh registry.example.com/team/image:tag image.sqsh\n"
        "          sqsh dist/cpu/oci image.sqsh --level 3\n"
        "          docker save image -o image.tar && sqsh image.tar image.sqsh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("image", help="a registry's reference, an OCI layout, or an archive of docker save")
    add("out", type=Path, help="the file to write")
    add("--engine", choices=["own", "enroot"], default="own", help="enroot: let `enroot import` do it, where installed")
    add("--compressor", choices=IDS, default="zstd")
    add("--level", type=int, help="of the compressor (zstd 1, gzip 6, xz 6)")
    add("--block-size", type=_size, default=1 << 17, metavar="BYTES", help="4K to 1M (128K)")
    add("--processors", type=int, default=0, help="how many to use (all)")
    add("--platform", default="", help="which image of an index, such as linux/arm64 (this machine's)")
    add("--name", default="", help="stated in /opt/release/image.json")
    add("--keep-owner", action="store_true", help="keep the image's owners; else root owns all, as with enroot")
    add("--plain", action="store_true", help="the image's tree alone: no start files, modes and /dev as they are")
    add("--cache", type=Path, default=_cache_folder(), metavar="FOLDER", help="indexes of earlier outputs")
    add("--cache-size", type=_size, default=1 << 30, metavar="BYTES", help="what the cache may take (1G)")
    add("--no-cache", action="store_true", help="neither use nor write the cache")
    add("--max-size", type=_size, default=Limits.bytes, metavar="BYTES", help="what a layer may unpack to (1T)")
    add("--max-ratio", type=int, default=Limits.ratio, help="of a large layer's unpacked to its packed size (400)")
    add("--max-entries", type=int, default=Limits.entries, help="in a layer (4 million)")
    add("--verify", action="store_true", help="read the result back and hold it against the layers, entry by entry")
    add("--json", action="store_true", help="print the result as JSON")
    add("--quiet", action="store_true", help="say nothing but errors")
    add("--debug", action="store_true", help="show a traceback on errors")
    add("--version", action="version", version=f"sqsh {__version__}")
    return parser


def _convert(arguments: argparse.Namespace) -> Result:
    say = _Say(arguments.quiet)
    options = Options(
        compressor=arguments.compressor,
        level=arguments.level,
        block_size=arguments.block_size,
        keep_owner=arguments.keep_owner,
        plain=arguments.plain,
        name=arguments.name,
        platform=arguments.platform,
        processors=arguments.processors,
        cache=None if arguments.no_cache else arguments.cache,
        cache_size=arguments.cache_size,
        limits=Limits(arguments.max_size, arguments.max_ratio, entries=arguments.max_entries),
        progress=say.progress,
        note=say.line,
    )
    if arguments.processors < 0:
        raise UsageError(f"--processors {arguments.processors} is no number of processors")
    image = find_image(arguments.image, arguments.platform, options.note, options.limits)
    result = convert(image, arguments.out, options)
    say.line(
        f"{result.out}: {_text(result.size)} in {result.seconds:.1f} s, {result.inodes} inodes, "
        f"{result.layers_copied} of {result.layers} layers from an earlier output, from {result.digest}"
    )
    if arguments.verify:
        count = verify(image, arguments.out, options)
        say.line(f"{result.out}: all of its {count} entries are as the layers have them")
    return result


def _enroot(arguments: argparse.Namespace) -> int:
    """What enroot makes of it, by its own settings (ENROOT_SQUASH_OPTIONS and the like)."""
    reference = parse_reference(arguments.image)
    if shutil.which("enroot") is None:
        raise UsageError("enroot is not installed", "leave --engine out")
    separator = "@" if reference.is_digest else ":"
    user = f"{reference.user}@" if reference.user else ""
    image = f"docker://{user}{reference.host}#{reference.repository}{separator}{reference.name}"
    return subprocess.run(["enroot", "import", "--output", arguments.out, image]).returncode and 1


class _Say:
    """Messages on stderr, and on a terminal a progress line."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._started = time.monotonic()
        self._last = 0.0

    def line(self, text: str) -> None:
        if not self._quiet:
            print(f"\r\x1b[K{text}" if self._live else text, file=sys.stderr)

    def progress(self, done: int, size: int) -> None:
        now = time.monotonic()
        if not self._live or now - self._last < 0.2:
            return
        self._last = now
        rate = done / max(now - self._started, 0.001)
        left = f", {(size - done) / rate:.0f} s left" if rate else ""
        text = f"{_text(done)} of {_text(size)}, {_text(rate)}/s{left}"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _text(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _size(text: str) -> int:
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    if unit not in UNITS or not number.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write bytes, or such as 128K, 1M, 2G")
    return int(number) * UNITS[unit]


def _cache_folder() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sqsh"
    except RuntimeError:  # a user without a home has no cache
        return None


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt

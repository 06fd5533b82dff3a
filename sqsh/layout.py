"""Images in the folder of an OCI layout."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from sqsh.errors import BadImage, UsageError
from sqsh.manifest import Image, Source, Store, from_index


def layout_image(text: str, folder: Path, tag: str, platform: str) -> Image:
    return from_index(text, _read_index(folder / "index.json"), LayoutStore(folder), tag, platform)


def _read_index(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path.parent} is no OCI layout", "it has no index.json") from None
    except OSError as error:
        raise BadImage(f"{path} cannot be read ({error.strerror})", "the layout is not whole") from None


class LayoutStore(Store):
    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs"

    def open(self, digest: str, size: int, stopped: threading.Event | None = None) -> Source:
        path = self._blobs / digest.replace(":", "/", 1)
        try:
            source = path.open("rb", buffering=0)
        except OSError as error:
            raise BadImage(f"{path} cannot be read ({error.strerror})", "the layout is not whole") from None
        with contextlib.suppress(OSError):  # not every file system knows advice
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return source

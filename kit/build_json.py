"""/opt/release/build.json of an image, read from its layers: what was known when it was built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sqsh.cancel import Cancel, in_thread
from sqsh.image import find_image
from sqsh.stream import LayerStream, Limits
from sqsh.tar import TarReader

BUILD_JSON = "opt/release/build.json"


def build_json(layout: Path) -> Any:
    """Raises SqshError where a layer cannot be read, and ValueError where no layer has the file as JSON."""
    return json.loads(in_thread(lambda cancel: _file_in(layout, BUILD_JSON, cancel)))


def _file_in(layout: Path, path: str, cancel: Cancel) -> bytes:
    """Content of a file in the uppermost layer that has it; nothing where none does."""
    wanted = tuple(part.encode() for part in path.split("/"))
    for blob in reversed(find_image(str(layout)).layers):
        with LayerStream(blob, Limits(), lambda size: None, cancel) as stream:
            reader = TarReader(stream, blob.digest)
            for member in reader.members():
                if member.path == wanted:
                    return b"".join(bytes(block) for block in reader.data(member, 1 << 20))
    return b""

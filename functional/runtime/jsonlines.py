"""Appending to a JSON Lines file: one line a row."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class JsonLines:
    """What `append` was given survives the death of this process once it returns; with `synced`, the machine's too."""

    def __init__(self, path: Path, synced: bool = False) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._synced = synced

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write the rows, each as a line."""
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()
        if self._synced:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

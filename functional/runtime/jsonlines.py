"""JSON Lines files: appended a line a row, read back whole."""

import json
import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec


class JsonLines:
    """What it was given survives the death of this process once a call returns; with `synced`, the machine's too."""

    def __init__(self, path: Path, synced: bool = False) -> None:
        self._file = path.open("ab", buffering=0)
        self._synced = synced

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write the rows, each as a line."""
        self._write("".join(json.dumps(row) + "\n" for row in rows).encode())

    def append_records(self, records: Iterable[Any]) -> None:
        """Write dataclass instances, each as a line; numbers that are not finite become null."""
        self._write(msgspec.json.Encoder().encode_lines(list(records)))

    def _write(self, lines: bytes) -> None:
        write_whole(self._file, lines)
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


def write_whole(file: FileIO, data: bytes) -> None:
    """An unbuffered file may take a part only. Raises OSError where it takes no more: what it took stays."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of the file; a torn last one is passed over. Raises ValueError for another that is broken."""
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: broken record: {error}") from error
    return rows

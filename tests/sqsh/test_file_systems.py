"""File systems that lack a call: the conversion goes on and says what that means."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from sqsh.convert import Options, convert
from sqsh.errors import SqshError
from tests.sqsh.layers import Item, write_image

pytestmark = pytest.mark.sqsh


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    write_image(tmp_path / "oci", [[Item(b"a", b"x")]])
    return tmp_path / "oci"


def lacks(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """From now on `call` fails: flock, fchmod, or fsync for a folder."""
    real = os.fsync

    def fail(handle: int, *_: Any) -> None:
        if call == "fsync" and not stat.S_ISDIR(os.fstat(handle).st_mode):
            return real(handle)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl if call == "flock" else os, call, fail)


@pytest.mark.parametrize(
    ("call", "number", "part"),
    [
        ("flock", errno.ENOSYS, "cannot lock files"),
        ("flock", errno.ENOLCK, "cannot lock files"),
        ("flock", errno.EOPNOTSUPP, "cannot lock files"),
        ("fsync", errno.EINVAL, "cannot sync folders"),
        ("fsync", errno.EOPNOTSUPP, "cannot sync folders"),
        ("fchmod", errno.EPERM, "cannot set a file's mode"),
    ],
)
def test_a_call_that_is_not_known(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, part: str
) -> None:
    convert(str(layout), tmp_path / "wanted")
    lacks(monkeypatch, call, number)
    notes: list[str] = []
    for _ in range(2):
        convert(str(layout), tmp_path / "out", Options(note=notes.append))
    assert (tmp_path / "out").read_bytes() == (tmp_path / "wanted").read_bytes()
    assert [part in note for note in notes] == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["oci", "out", "wanted"]


@pytest.mark.parametrize("call", ["flock", "fsync", "fchmod"])
def test_a_call_that_fails(layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    lacks(monkeypatch, call, errno.EIO)
    with pytest.raises(SqshError, match="could not be written"):
        convert(str(layout), tmp_path / "out")
    assert not list(tmp_path.glob(".out*"))


def test_without_locks_nothing_of_another_conversion_is_removed(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".out.0123.part").write_text("of another conversion, or left by one")
    lacks(monkeypatch, "flock", errno.ENOSYS)
    convert(str(layout), tmp_path / "out")
    assert (tmp_path / ".out.0123.part").exists()
    monkeypatch.undo()
    convert(str(layout), tmp_path / "out")
    assert not (tmp_path / ".out.0123.part").exists()

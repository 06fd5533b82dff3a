"""File systems without locks or without sync of folders: the kit goes on and says what that means."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from kit import files, layout
from kit.files import write_atomic
from kit.layout import only_run

pytestmark = pytest.mark.unit


def fails(number: int) -> None:
    raise OSError(number, os.strerror(number))


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(files, "say", found.append)
    files._note_once.cache_clear()
    return found


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str], number: int) -> None:
    monkeypatch.setattr(layout, "state_dir", lambda: tmp_path)
    monkeypatch.setattr(fcntl, "flock", lambda *_: fails(number))
    for _ in range(2):
        with only_run("image"):
            assert (tmp_path / "locks/image.lock").read_text() == str(os.getpid())
    assert len(notes) == 1
    assert "cannot lock files: see that no other 'image' runs here" in notes[0]


def test_without_sync_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> None:
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: fails(errno.EINVAL) if stat.S_ISDIR(os.fstat(handle).st_mode) else real(handle)
    )
    write_atomic(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert "cannot sync folders" in notes[0]


def test_what_fails_is_no_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> None:
    monkeypatch.setattr(layout, "state_dir", lambda: tmp_path)
    monkeypatch.setattr(fcntl, "flock", lambda *_: fails(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), only_run("image"):
        pytest.fail("it runs without its lock")
    assert notes == []

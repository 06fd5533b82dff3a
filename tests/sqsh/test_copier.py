"""The process that copies: what it copies, and how it says that it cannot."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqsh.copier import MOST_ASKED, PART, Changed, Copier

pytestmark = pytest.mark.sqsh
REPO = Path(__file__).resolve().parents[2]
SIZE = 5 * PART + 1234


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    found = random.Random(7).randbytes(SIZE)
    (tmp_path / "source").write_bytes(found)
    return found


@pytest.fixture
def source(content: bytes, tmp_path: Path) -> Iterator[int]:
    handle = os.open(tmp_path / "source", os.O_RDONLY)
    yield handle
    os.close(handle)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    handle = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield handle
    os.close(handle)


@pytest.fixture
def copier(target: int) -> Iterator[Copier]:
    found = Copier(target)
    yield found
    found.close()


def test_it_copies_from_several_files_to_where_it_is_told(
    copier: Copier, content: bytes, source: int, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(b"other")
    other = os.open(tmp_path / "other", os.O_RDONLY)
    copier.copy(source, 3, 100, SIZE - 3, zlib.crc32(content[3:]))
    copier.copy(other, 1, 0, 4, zlib.crc32(b"ther"))
    for at in range(4, 100, 2):
        copier.copy(source, at, at, 2, zlib.crc32(content[at : at + 2]))
    copier.finish()
    os.close(other)
    assert (tmp_path / "target").read_bytes() == b"ther" + content[4:100] + content[3:]


@pytest.mark.parametrize(("start", "total"), [(0, 1), (1, 0)])
def test_another_check_sum_and_an_early_end(
    copier: Copier, content: bytes, source: int, start: int, total: int
) -> None:
    copier.copy(source, start, 0, SIZE, total or zlib.crc32(content[start:]))
    with pytest.raises(Changed):
        copier.finish()


def test_a_source_that_cannot_be_read(copier: Copier, tmp_path: Path) -> None:
    unreadable = os.open(tmp_path / "source", os.O_WRONLY | os.O_CREAT)
    copier.copy(unreadable, 0, 0, 1, 0)
    with pytest.raises(Changed):
        copier.finish()
    os.close(unreadable)


def test_a_full_disk(source: int, content: bytes) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    copier = Copier(full)
    copier.copy(source, 0, 0, SIZE, zlib.crc32(content))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        copier.finish()
    copier.close()
    os.close(full)


def test_it_ends_before_it_has_answered(copier: Copier, source: int, content: bytes) -> None:
    copier._process.kill()
    with pytest.raises(Changed):
        ask_often(copier, source, content)


def test_what_is_wrong_shows_before_the_end(copier: Copier, source: int, content: bytes) -> None:
    with pytest.raises(Changed):
        ask_often(copier, source, content[1:])


def ask_often(copier: Copier, source: int, content: bytes) -> None:
    for _ in range(MOST_ASKED):
        copier.copy(source, 0, 0, SIZE, zlib.crc32(content))


ABANDONED = """
import os, signal, sys, time
from sqsh.copier import Copier

copier = Copier(2)
copier.copy(0, 0, 0, 0, 0)
copier.finish()
os.kill(copier._process.pid, signal.SIGSTOP)
print(copier._process.pid, flush=True)
time.sleep(60)
"""


def test_it_does_not_outlive_the_conversion() -> None:
    process = subprocess.Popen([sys.executable, "-c", ABANDONED], cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[-1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)

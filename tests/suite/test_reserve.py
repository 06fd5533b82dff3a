"""Space that is kept for the report: taken at the start, given back at the end, refused where there is none."""

import errno
import subprocess

import pytest

from functional.runtime.errors import ConfigError
from functional.suite.driver import prepare_out
from functional.suite.reserve import RESERVE_BYTES, Reserve, is_full
from tests.suite.test_pages import ended


@pytest.fixture
def small(tmp_path):
    """A file system with room for half of it."""
    path = tmp_path / "small"
    path.mkdir()
    size = f"size={RESERVE_BYTES // 2}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", path], capture_output=True)
    if done.returncode:
        pytest.skip("mounting needs root")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def test_it_takes_the_space_and_gives_it_back(tmp_path):
    reserve = Reserve(tmp_path)
    assert (tmp_path / ".reserve").stat().st_blocks * 512 >= RESERVE_BYTES
    reserve.give_back()
    reserve.give_back()
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_bad_input_and_nothing_is_left_of_it(small):
    with pytest.raises(ConfigError, match="no room for the 4 MiB that the report may take"):
        Reserve(small)
    assert list(small.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/out: Not a directory: name a folder with room, to write to, as --out"):
        prepare_out(tmp_path / "file/out", ended(tmp_path))


def test_what_counts_as_full():
    assert is_full(OSError(errno.ENOSPC, "No space left on device"))
    assert is_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert not is_full(OSError(errno.EIO, "Input/output error"))
    assert not is_full(ValueError("full"))

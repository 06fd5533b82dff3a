"""Tars that are unusual but sound: what container runtimes make of them is what we make of them."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from sqsh.convert import Options
from sqsh.reader import Squashfs
from tests.sqsh.layers import Item, converted, folder, hardlink, made, tree, unsquashed

pytestmark = pytest.mark.sqsh
END = bytes(1024)


def entry(
    name: bytes, data: bytes = b"", flag: bytes = b"0", check: bytes = b"%06o\0 ", mode: bytes = b"0000644\0"
) -> bytes:
    fields = name.ljust(100, b"\0") + mode + b"0000000\0" * 2 + b"%011o\0" % len(data) + b"00000000000\0"
    rest = flag + bytes(100) + (b"ustar\x0000" if flag != b"\0" else bytes(8)) + bytes(247)
    header = fields + check % (sum(fields) + 8 * 32 + sum(rest)) + rest
    return header + data + bytes(-len(data) % 512)


def pax(record: bytes) -> bytes:
    size = next(size for size in range(len(record), 200) if len(b"%d %b\n" % (size, record)) == size)
    return entry(b"pax", b"%d %b\n" % (size, record), b"x")


def test_a_slash_at_the_end_of_a_name(tmp_path: Path) -> None:
    """It makes a folder of what has no type alone; of ustar's file it is no part, and the content follows."""
    raw = entry(b"file/", b"content") + entry(b"old/", flag=b"\0") + entry(b"old/file", b"x", b"\0") + END
    out = unsquashed(made(tmp_path, [raw]), tmp_path / "out")
    assert (out / "file").read_bytes() == b"content"
    assert (out / "old/file").read_bytes() == b"x"


@pytest.mark.parametrize("check", [b"%06o\0 ", b" %06o\0", b"\0%06o\0", b"%08o", b"%07o\0"])
@pytest.mark.parametrize("mode", [b"0000640\0", b"\0\0\x00640\0 ", b"   640 \0", b"00000640"])
def test_numbers_in_a_header(tmp_path: Path, check: bytes, mode: bytes) -> None:
    out = unsquashed(made(tmp_path, [entry(b"a", b"x", check=check, mode=mode) + END]), tmp_path / "out")
    assert (out / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("key", [b"comment", b"VENDOR.blob", b"SCHILY.xattr.user.x", b"LIBARCHIVE.creationtime"])
def test_binary_values_of_records(tmp_path: Path, key: bytes) -> None:
    """Only names may hold no NUL: what else a tool notes down for itself may be anything."""
    out = unsquashed(made(tmp_path, [pax(key + b"=a\0b") + entry(b"a", b"x") + END]), tmp_path / "out")
    assert (out / "a").read_bytes() == b"x"


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("root", [b"", b"./", b"/"])
def test_bookkeeping_of_aufs(tmp_path: Path, form: int, root: bytes) -> None:
    """Old layers have it: it is no part of the image, but hard links may name its files (moby/moby#3884)."""
    layers: list[list[Item] | bytes] = [
        [Item(b"below", b"below")],
        [
            folder(root + b".wh..wh.plnk"), Item(root + b".wh..wh.plnk/1.2", b"content"), Item(root + b".wh..wh.aufs"),
            folder(root + b".wh..wh.orph"), Item(root + b".wh..wh.plnk/3.4", b"nobody's"),
            hardlink(root + b"one", root + b".wh..wh.plnk/1.2"), hardlink(b"two", root + b".wh..wh.plnk/1.2"),
        ],
    ]  # fmt: skip
    out = tree(unsquashed(made(tmp_path, layers), tmp_path / "out"))
    assert set(out) == {b"below", b"one", b"two"}
    assert (tmp_path / "out/one").read_bytes() == b"content"
    assert (tmp_path / "out/one").stat().st_ino == (tmp_path / "out/two").stat().st_ino


def test_bookkeeping_of_aufs_from_the_cache(tmp_path: Path) -> None:
    link = [folder(b".wh..wh.plnk"), Item(b".wh..wh.plnk/1.2", b"content" * 99), hardlink(b"one", b".wh..wh.plnk/1.2")]
    options = Options(plain=True, cache=tmp_path / "cache")
    first = made(tmp_path, [link], options)
    again = converted(tmp_path / "oci", tmp_path / "again", options)
    assert again.layers_copied == 1
    assert (tmp_path / "again").read_bytes() == first.read_bytes()
    assert [path for path, _ in Squashfs(tmp_path / "again").walk()] == [b"", b"one"]

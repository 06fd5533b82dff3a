"""Names that count from the image's root, and entries below a folder that a lower layer has as a link."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sqsh import tree
from sqsh.convert import convert
from sqsh.errors import BadImage
from sqsh.reader import Squashfs
from tests.sqsh.layers import PLAIN, Item, folder, hardlink, made, symlink, tar, write_image

pytestmark = pytest.mark.sqsh

BASE = [folder(b"usr"), folder(b"usr/lib"), Item(b"usr/lib/libc.so", b"C"), symlink(b"lib", b"usr/lib")]
F = Item(b"lib/foo", b"F")


def names(squashfs: Path) -> set[bytes]:
    found = Squashfs(squashfs)
    try:
        return {path for path, _ in found.walk()} - {b""}
    finally:
        found.close()


def numbers(squashfs: Path) -> dict[bytes, int]:
    found = Squashfs(squashfs)
    try:
        return {path: entry.number for path, entry in found.walk()}
    finally:
        found.close()


WHOLE = {b"usr", b"usr/lib", b"usr/lib/libc.so", b"lib"}


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ([BASE, [F]], {*WHOLE, b"usr/lib/foo"}),
        ([BASE, [folder(b"lib"), F]], {*WHOLE, b"lib/foo"}),
        ([BASE, [F], [Item(b"usr/lib/foo", b"other")]], {*WHOLE, b"usr/lib/foo"}),
        ([BASE, [F], [Item(b"lib/.wh.foo")]], WHOLE),
        ([BASE, [F], [Item(b"usr/lib/.wh.foo")]], WHOLE),
        ([BASE, [Item(b"lib/.wh.libc.so")]], WHOLE - {b"usr/lib/libc.so"}),
        ([BASE, [Item(b"lib/.wh..wh..opq"), F]], (WHOLE - {b"usr/lib/libc.so"}) | {b"usr/lib/foo"}),
        ([BASE, [Item(b"lib/sub/deep/x")]], {*WHOLE, b"usr/lib/sub", b"usr/lib/sub/deep", b"usr/lib/sub/deep/x"}),
        ([BASE, [folder(b"lib/sub"), Item(b"lib/sub/x")]], {*WHOLE, b"usr/lib/sub", b"usr/lib/sub/x"}),
        # a later layer takes the link away, or puts something else there
        ([BASE, [F], [Item(b".wh.lib")]], (WHOLE - {b"lib"}) | {b"usr/lib/foo"}),
        ([BASE, [F], [Item(b"lib", b"file")]], {*WHOLE, b"usr/lib/foo"}),
        ([BASE, [F], [folder(b"lib"), Item(b"lib/bar")]], {*WHOLE, b"usr/lib/foo", b"lib/bar"}),
        ([BASE, [F], [folder(b"lib")], [Item(b"lib/bar")]], {*WHOLE, b"usr/lib/foo", b"lib/bar"}),
        ([BASE, [F], [Item(b".wh.lib"), Item(b"lib/bar")]], {*WHOLE, b"usr/lib/foo", b"lib/bar"}),
        ([BASE, [F], [Item(b".wh..wh..opq"), Item(b"lib/bar")]], {b"lib", b"lib/bar"}),
        (
            [BASE, [F], [symlink(b"lib", b"other")], [Item(b"lib/bar")]],
            {*WHOLE, b"usr/lib/foo", b"other", b"other/bar"},
        ),
        # the folder that the link leads to goes
        ([BASE, [F], [Item(b"usr/.wh.lib")]], {b"usr", b"lib"}),
        ([BASE, [F], [folder(b"usr"), Item(b"usr/.wh..wh..opq")]], {b"usr", b"lib"}),
        # links that lead through links, of this and of other layers
        ([BASE, [symlink(b"lib64", b"lib")], [Item(b"lib64/foo")]], {*WHOLE, b"lib64", b"usr/lib/foo"}),
        (
            [[folder(b"system"), symlink(b"usr", b"/system")], [symlink(b"lib", b"usr/lib")], [F]],
            {b"system", b"usr", b"lib", b"system/lib", b"system/lib/foo"},
        ),
        (
            [[folder(b"a/b/c"), symlink(b"x", b"a/b/c")], [symlink(b"l", b"x/../d")], [Item(b"l/f")]],
            {b"a", b"a/b", b"a/b/c", b"x", b"l", b"a/b/d", b"a/b/d/f"},
        ),
        ([[folder(b"d"), symlink(b"d/up", b"../e")], [Item(b"d/up/f")]], {b"d", b"d/up", b"e", b"e/f"}),
        ([[symlink(b"here", b"."), Item(b"here/f")]], {b"here", b"f"}),
        ([[symlink(b"l", b"/etc"), Item(b"l/passwd")]], {b"l", b"etc", b"etc/passwd"}),
        ([[symlink(b"l", b"/etc")], [Item(b"l/passwd")]], {b"l", b"etc", b"etc/passwd"}),
        ([[Item(b"etc/passwd"), symlink(b"l", b"/etc")], [Item(b"l/.wh.passwd")]], {b"l", b"etc"}),
        # what seems to be in the way lies elsewhere
        (
            [BASE, [F], [folder(b"usr/lib/foo")], [Item(b"lib/foo/bar")]],
            {*WHOLE, b"usr/lib/foo", b"usr/lib/foo/bar"},
        ),
        (
            [BASE, [Item(b"usr/lib/foo"), folder(b"lib/foo"), Item(b"usr/lib/foo/x")]],
            {*WHOLE, b"usr/lib/foo", b"usr/lib/foo/x"},
        ),
        # a folder stated anew in place of what was there has nothing of it
        (
            [[folder(b"c"), symlink(b"c/b", b"d")], [symlink(b"c", b"x"), folder(b"c"), Item(b"c/b/f")]],
            {b"c", b"c/b", b"c/b/f"},
        ),
        # what comes later in the same layer changes nothing of where an entry has gone, and else the last one counts
        ([BASE, [F, symlink(b"lib", b"usr")]], {*WHOLE, b"usr/lib/foo"}),
        ([BASE, [F, folder(b"lib"), Item(b"lib/bar")]], {*WHOLE, b"usr/lib/foo", b"lib/bar"}),
        ([[folder(b"lib")], [F, symlink(b"lib", b"usr")]], {b"lib"}),
        ([BASE, [F, Item(b".wh.lib")]], {*WHOLE, b"lib/foo"}),
        ([[symlink(b"l", b"a"), Item(b"l/1"), symlink(b"l", b"b"), Item(b"l/2")]], {b"l", b"a", b"a/1", b"b", b"b/2"}),
    ],
)
def test_where_entries_below_a_link_go(tmp_path: Path, layers: list[list[Item] | bytes], wanted: set[bytes]) -> None:
    assert names(made(tmp_path, layers)) == wanted


def test_what_seemed_hidden_shows_and_what_seemed_to_show_is_hidden(tmp_path: Path) -> None:
    """The layers above are read before the link: what they hold for elsewhere is read again, or left out."""
    noise, other = os.urandom(200_000), os.urandom(150_000)
    layers: list[list[Item] | bytes] = [
        BASE,
        [Item(b"lib/shows", noise), Item(b"lib/hidden", other)],
        [Item(b"usr/lib/hidden", b"upper"), Item(b".wh.lib")],
        [Item(b"lib/shows", b"no")],
    ]
    squashfs = made(tmp_path, layers)
    assert names(squashfs) == {
        b"usr", b"usr/lib", b"usr/lib/libc.so", b"usr/lib/shows", b"usr/lib/hidden", b"lib", b"lib/shows",
    }  # fmt: skip
    assert squashfs.stat().st_size > 200_000
    assert squashfs.read_bytes().count(noise[:131072]) == 1


@pytest.mark.parametrize("target", [b"usr/lib/libc.so", b"lib/libc.so", b"/lib/libc.so", b"usr/../lib/./libc.so"])
def test_hard_links_through_links(tmp_path: Path, target: bytes) -> None:
    found = numbers(made(tmp_path / "1", [BASE, [hardlink(b"alias", target)]]))
    assert found[b"alias"] == found[b"usr/lib/libc.so"]
    found = numbers(made(tmp_path / "2", [BASE, [F], [hardlink(b"lib/alias", target), hardlink(b"foo", b"lib/foo")]]))
    assert found[b"usr/lib/alias"] == found[b"usr/lib/libc.so"]
    assert found[b"foo"] == found[b"usr/lib/foo"]
    found = numbers(made(tmp_path / "3", [[*BASE, hardlink(b"alias", target), hardlink(b"same", b"lib")]]))
    assert found[b"alias"] == found[b"usr/lib/libc.so"]
    assert found[b"same"] == found[b"lib"]


def test_a_hard_link_to_a_link_that_its_own_layer_writes_through(tmp_path: Path) -> None:
    found = numbers(made(tmp_path, [BASE, [F, hardlink(b"lib64", b"lib")]]))
    assert found[b"lib64"] == found[b"lib"]
    assert b"usr/lib/foo" in found


def test_a_hard_link_names_what_was_there_in_its_own_layer(tmp_path: Path) -> None:
    layers: list[list[Item] | bytes] = [
        BASE,
        [hardlink(b"alias", b"lib/libc.so")],
        [folder(b"lib"), Item(b"lib/libc.so", b"N")],
    ]
    found = numbers(made(tmp_path, layers))
    assert found[b"alias"] == found[b"usr/lib/libc.so"] != found[b"lib/libc.so"]


def test_a_hard_link_below_a_folder_that_has_replaced_the_link(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="hard link"):
        made(tmp_path, [BASE, [folder(b"lib")], [hardlink(b"alias", b"lib/libc.so")]])


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_from_the_root(tmp_path: Path, form: int) -> None:
    long = b"/opt/" + b"n" * 90 + b"/" + b"m" * 90
    lower = [Item(b"/etc/gone"), Item(b"/etc/stays"), Item(b"//srv//x"), Item(b"/d/old"), folder(b"/")]
    upper = [
        folder(b"/opt"), Item(long, b"1"), hardlink(b"alias", long), hardlink(b"/x", b"/srv/x"),
        symlink(b"/l", b"/opt"),
        Item(b"/etc/.wh.gone"), Item(b"/d/.wh..wh..opq"), Item(b"/.wh.srv"), Item(b"a/../b/./c"),
    ]  # fmt: skip
    squashfs = made(tmp_path, [tar(lower, form), tar(upper, form)])
    deep = long[1:].rpartition(b"/")[0]
    wanted = {b"opt", deep, long[1:], b"alias", b"x", b"l", b"etc", b"etc/stays", b"d", b"b", b"b/c"}
    assert names(squashfs) == wanted
    assert numbers(squashfs)[b"alias"] == numbers(squashfs)[long[1:]]


def test_the_same_bytes_as_without_links_and_from_the_cache(tmp_path: Path) -> None:
    chance = [Item(b"lib/%d" % number, os.urandom(1 + number * 7000)) for number in range(40)]
    moved = [Item(b"usr/" + item.name, item.data) for item in chance]
    write_image(tmp_path / "oci", [BASE, chance, [Item(b"usr/lib/.wh.3")]])
    write_image(tmp_path / "plain", [BASE, moved, [Item(b"usr/lib/.wh.3")]])
    convert(str(tmp_path / "plain"), tmp_path / "wanted", PLAIN)
    cached = replace(PLAIN, cache=tmp_path / "cache")
    for name, copied in (("1", 0), ("2", None)):
        result = convert(str(tmp_path / "oci"), tmp_path / name, cached)
        assert copied is None or result.layers_copied == copied
        assert names(tmp_path / name) == names(tmp_path / "wanted")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_layers_laid_anew_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_TURNS", 3)
    links: Sequence[list[Item]] = [[symlink(b"l%d" % number, b"usr")] for number in range(5)]
    with pytest.raises(BadImage, match="links without end"):
        made(tmp_path, [*links, [Item(b"l%d/x" % number) for number in range(5)]])

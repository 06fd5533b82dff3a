"""What differs between two images: every kind of difference is named, and nothing else is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kit import layout
from kit.diff import Difference, diff_images, report_difference
from kit.errors import UsageError
from tests.kit.conftest import Kit, kit, refused
from tests.sqsh.layers import Item, folder, hardlink, symlink, tar, write_image

__all__ = ["kit"]
pytestmark = pytest.mark.unit

BASE = (
    folder(b"opt"),
    Item(b"opt/a", b"content"),
    Item(b"opt/b", b"content"),
    symlink(b"opt/link", b"a"),
    hardlink(b"opt/hard", b"opt/a"),
)


def compared(root: Path, first: Sequence[Item] | bytes, second: Sequence[Item] | bytes) -> Difference:
    """Two images of two layers, the lower one equal."""
    lower = [Item(b"below", b"x")]
    write_image(root / "first", [lower, first])
    write_image(root / "second", [lower, second])
    return diff_images(str(root / "first"), str(root / "second"))


def replaced(name: bytes, item: Item | None) -> list[Item]:
    return [new for new in (item if entry.name == name else entry for entry in BASE) if new is not None]


def test_the_same_image_twice_is_equal(tmp_path: Path) -> None:
    difference = compared(tmp_path, BASE, BASE)
    assert difference.equal
    assert report_difference(difference) == 0


@pytest.mark.parametrize(
    ("item", "what"),
    [
        (Item(b"opt/a", b"other"), {"content"}),
        (Item(b"opt/a", b"content", mode=0o600), {"mode"}),
        (Item(b"opt/a", b"content", owner=7), {"owner"}),
        (Item(b"opt/a", b"content", mtime=5), {"mtime"}),
        (Item(b"opt/a", b"content", xattrs={"user.x": b"1"}), {"xattr user.x"}),
        (symlink(b"opt/a", b"b"), {"type", "mode", "content", "target"}),
    ],
)
def test_each_property_of_a_file_is_named(tmp_path: Path, item: Item, what: set[str]) -> None:
    difference = compared(tmp_path, BASE, replaced(b"opt/a", item))
    assert not difference.equal
    (layer,) = difference.layers
    assert layer.numbers == (2, 2)
    (change,) = layer.changes
    assert (change.path, change.change, set(change.what)) == ("/opt/a", "changed", what)
    assert report_difference(difference) == 1


def test_where_links_point_to(tmp_path: Path) -> None:
    links = [*BASE[:3], symlink(b"opt/link", b"b"), hardlink(b"opt/hard", b"opt/b")]
    (layer,) = compared(tmp_path, BASE, links).layers
    assert [(change.path, change.what) for change in layer.changes] == [
        ("/opt/hard", {"target": ("/opt/a", "/opt/b")}),
        ("/opt/link", {"target": ("a", "b")}),
    ]


def test_what_is_in_one_of_them_only(tmp_path: Path) -> None:
    (layer,) = compared(tmp_path, BASE, [*replaced(b"opt/link", None), Item(b"opt/new\n\xff", b"x")]).layers
    assert [(change.path, change.change) for change in layer.changes] == [
        ("/opt/link", "removed"),
        ("/opt/new\\n\\xff", "added"),
    ]


def test_of_several_entries_of_one_path_the_last_counts(tmp_path: Path) -> None:
    (layer,) = compared(tmp_path, BASE, [*BASE, Item(b"opt/a", b"later")]).layers
    assert [change.path for change in layer.changes] == ["/opt/a"]


def test_another_order_and_other_bytes_of_the_same_entries_are_told_apart(tmp_path: Path) -> None:
    order = compared(tmp_path / "order", BASE, [BASE[0], BASE[2], BASE[1], *BASE[3:]])
    assert [(layer.changes, layer.note) for layer in order.layers] == [([], "the same entries, in another order")]
    padded = compared(tmp_path / "bytes", BASE, tar(BASE) + bytes(10240))
    assert [layer.note for layer in padded.layers] == ["the same entries, written or compressed otherwise"]


def test_the_configuration(tmp_path: Path) -> None:
    write_image(tmp_path / "first", [BASE], {"Env": ["A=1"], "Cmd": ["sh"]})
    write_image(tmp_path / "second", [BASE], {"Env": ["A=2", "B=1"]})
    difference = diff_images(str(tmp_path / "first"), str(tmp_path / "second"))
    assert difference.layers == []
    assert {entry.key: entry.values for entry in difference.config} == {
        "config.Cmd": ('["sh"]', None),
        "config.Env[0]": ('"A=1"', '"A=2"'),
        "config.Env[1]": (None, '"B=1"'),
    }


def test_a_layer_more_leaves_the_others_paired(tmp_path: Path) -> None:
    write_image(tmp_path / "first", [[Item(b"x")], BASE])
    write_image(tmp_path / "second", [[Item(b"x")], [Item(b"y")], BASE])
    (layer,) = diff_images(str(tmp_path / "first"), str(tmp_path / "second")).layers
    assert (layer.numbers, layer.note) == ((None, 2), "only in the second image")


def test_an_image_that_cannot_be_read_is_bad_input_not_a_difference(tmp_path: Path) -> None:
    write_image(tmp_path / "first", [BASE])
    write_image(tmp_path / "second", [[Item(b"x")]])
    blob = max((tmp_path / "second/blobs/sha256").iterdir(), key=lambda path: path.read_bytes()[:2] == b"\x1f\x8b")
    blob.write_bytes(blob.read_bytes()[:-9])
    with pytest.raises(UsageError, match="is no valid gzip: it ends in the middle"):
        diff_images(str(tmp_path / "first"), str(tmp_path / "second"))
    for text in (str(tmp_path / "nothing"), "no-such-release", "127.0.0.1:9/a:b"):
        with pytest.raises(UsageError):
            diff_images(text, str(tmp_path / "first"))


def test_a_release_is_named_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "REPO", tmp_path)
    write_image(tmp_path / "dist/mine/oci", [BASE])
    assert diff_images("mine", str(tmp_path / "dist/mine/oci")).equal
    write_image(tmp_path / "here/mine", [[Item(b"x")]])
    monkeypatch.chdir(tmp_path / "here")
    assert diff_images("mine", "mine:image").equal
    assert not diff_images("mine", str(tmp_path / "dist/mine/oci")).equal


class TestCommand:
    @pytest.fixture
    def images(self, kit: Kit) -> Kit:
        write_image(kit.root / "dist/one/oci", [BASE])
        write_image(kit.root / "dist/two/oci", [replaced(b"opt/a", Item(b"opt/a", b"other"))])
        return kit

    def test_status_and_answer(self, images: Kit) -> None:
        equal = images("diff", "one", "one")
        assert (equal.returncode, equal.stdout.startswith("equal: sha256:")) == (0, True)
        different = images("diff", "one", "two")
        assert different.returncode == 1
        assert "  changed /opt/a: content sha256:" in different.stdout
        refused(images("diff", "one", "three"), 2, "no release or file 'three'", "registry/repository:tag")

    def test_json(self, images: Kit) -> None:
        finished = images("diff", "one", "two", "--json")
        assert finished.returncode == 1
        (change,) = json.loads(finished.stdout)["layers"][0]["changes"]
        assert (change["path"], change["change"], list(change["what"])) == ("/opt/a", "changed", ["content"])

    def test_a_reader_that_ends_early_is_no_error(self, images: Kit) -> None:
        many = [Item(b"%05d" % number, b"") for number in range(20000)]
        write_image(images.root / "dist/many/oci", [many])
        command = " ".join(f"'{word}'" for word in images.argv("diff", "one", "many"))
        finished = subprocess.run(
            ["bash", "-c", f"{command} | head -1"], env=images.env, cwd=images.root, capture_output=True, text=True
        )
        assert "error" not in finished.stderr
        assert "Exception" not in finished.stderr

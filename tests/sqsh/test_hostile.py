"""Images that are damaged or mean harm are refused in one line, and leave nothing behind."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
import zstandard

from sqsh.convert import Options
from sqsh.errors import BadImage
from sqsh.reader import Squashfs
from sqsh.stream import Limits
from tests.sqsh.layers import Item, converted, folder, hardlink, made, packed, symlink, tar, write_image

pytestmark = pytest.mark.sqsh


def refused(root: Path, layers: list[list[Item] | bytes], part: str, how: str = "gzip", **words: object) -> None:
    with pytest.raises(BadImage) as caught:
        made(root, layers, Options(**words), how)  # type: ignore[arg-type]
    assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(path.name for path in root.iterdir()) == ["oci"]


@pytest.mark.parametrize("name", [b"../x", b"a/../../x", b"a/..", b".."])
def test_leaving_the_folder(tmp_path: Path, name: bytes) -> None:
    refused(tmp_path, [[Item(name, b"x")]], "leaves its folder")


@pytest.mark.parametrize("target", [b"../x", b"/../x", b"a/../../x", b"a/.."])
def test_hard_links_to_the_outside(tmp_path: Path, target: bytes) -> None:
    refused(tmp_path, [[Item(b"a/b"), hardlink(b"x", target)]], "leaves its folder")


def test_hard_links_to_nothing(tmp_path: Path) -> None:
    refused(tmp_path / "1", [[hardlink(b"x", b"y")]], "in no layer below")
    refused(
        tmp_path / "2", [[Item(b"y")], [Item(b".wh.y")], [hardlink(b"x", b"y")]], "hides what a hard link above names"
    )
    refused(tmp_path / "3", [[folder(b"y")], [hardlink(b"x", b"y")]], "hides what a hard link above names")
    refused(tmp_path / "4", [[folder(b"y"), hardlink(b"x", b"y")]], "hard link to a folder")
    refused(tmp_path / "5", [[hardlink(b"x", b"x")]], "in no layer below")
    refused(tmp_path / "6", [[Item(b"l"), hardlink(b"x", b"l/etc")]], "through what is no folder")
    refused(tmp_path / "7", [[folder(b"etc"), symlink(b"l", b"/"), hardlink(b"x", b"l/etc")]], "hard link to a folder")
    refused(tmp_path / "8", [[symlink(b"l", b"/")], [hardlink(b"x", b"l/etc/shadow")]], "in no layer below")
    refused(tmp_path / "9", [[Item(b"l")], [hardlink(b"x", b"l/etc")]], "hides what a hard link above names")


def test_writes_through_what_is_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "1", [[Item(b"f", b"x"), Item(b"f/passwd", b"x")]], "writes through what is no folder")
    refused(tmp_path / "2", [[Item(b"f", b"x")], [Item(b"f/passwd", b"x")]], "as a folder, which in the layer below")
    refused(
        tmp_path / "3", [[Item(b"f", b"x")], [], [Item(b"f/passwd", b"x")]], "as a folder, which in the layer below"
    )
    refused(tmp_path / "4", [[Item(b"f", b"x")], [Item(b"f/.wh.passwd")]], "as a folder, which in the layer below")
    refused(tmp_path / "5", [[Item(b"f"), symlink(b"l", b"f"), Item(b"l/x")]], "writes through what is no folder")
    refused(
        tmp_path / "6", [[Item(b"f"), symlink(b"l", b"f")], [Item(b"l/x")]], "as a folder, which in the layer below"
    )


def test_links_without_end(tmp_path: Path) -> None:
    loop = [symlink(b"a", b"b"), symlink(b"b", b"a")]
    refused(tmp_path / "1", [[*loop, Item(b"a/x")]], "links without end")
    refused(tmp_path / "2", [loop, [Item(b"a/x")]], "links without end")
    refused(tmp_path / "3", [[symlink(b"a", b"a/b")], [Item(b"a/x")]], "links without end")
    refused(tmp_path / "4", [loop, [hardlink(b"x", b"a/x")]], "links without end")
    layers: list[list[Item] | bytes] = [[symlink(b"l%d" % number, b"l%d" % (number + 1))] for number in range(60)]
    refused(tmp_path / "5", [*reversed(layers), [Item(b"l0/x")]], "links without end")
    refused(tmp_path / "6", [[symlink(b"l", b"n" * 256)], [Item(b"l/x")]], "a link to a name that Linux does not allow")


def test_links_never_lead_out_of_the_image(tmp_path: Path) -> None:
    for number, target in enumerate((b"/../../..", b"../../..", b"/", b"d/../../..")):
        layers: list[list[Item] | bytes] = [[folder(b"d"), symlink(b"l", target)], [Item(b"l/x", b"here")]]
        squashfs = Squashfs(made(tmp_path / str(number), layers))
        assert {path for path, _ in squashfs.walk()} == {b"", b"d", b"l", b"x"}
        squashfs.close()


@pytest.mark.parametrize("name", [b".wh.", b".wh..", b".wh...", b"d/.wh..."])
def test_whiteouts_of_no_name(tmp_path: Path, name: bytes) -> None:
    refused(tmp_path, [[Item(name)]], "whiteout of no name")


def test_whiteouts_with_content(tmp_path: Path) -> None:
    refused(tmp_path, [[Item(b".wh.d/x", b"x")]], "whiteout for a folder")


def test_root_of_another_type(tmp_path: Path) -> None:
    refused(tmp_path, [[symlink(b"./", b"/etc")]], "root another type")


def test_names_that_no_system_takes(tmp_path: Path) -> None:
    refused(tmp_path / "1", [[Item(b"x" * 256)]], "a name that Linux does not allow")
    refused(tmp_path / "2", [[Item(b"/".join([b"d" * 99] * 50).lstrip(b"/"))]], "a path of")
    refused(tmp_path / "3", [[symlink(b"l", b"t" * 5000)]], "a target of 5000 bytes")
    refused(tmp_path / "4", [[symlink(b"l", b"")]], "a target of 0 bytes")


def raw(name: bytes = b"x", size: bytes = b"00000000000\0", flag: bytes = b"0", **fields: bytes) -> bytes:
    """One header with a right check sum and two blocks of end."""
    header = bytearray(512)
    header[: len(name)] = name
    header[100:108], header[108:116], header[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    header[124:136], header[136:148], header[156:157] = size, b"00000000000\0", flag
    header[257:265] = b"ustar\x0000"
    for place, value in fields.items():
        start = int(place.removeprefix("at_"))
        header[start : start + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def test_absurd_sizes(tmp_path: Path) -> None:
    refused(tmp_path / "1", [raw(size=b"77777777777\0")], "ends in the middle of an entry")
    refused(tmp_path / "2", [raw(size=b"\x80" + b"\xff" * 11)], "has a file of")
    refused(tmp_path / "3", [raw(size=b"\xff" * 12)], "has a file of")
    refused(tmp_path / "4", [raw(size=b"77777777777\0", flag=b"x")], "extended header of")
    refused(tmp_path / "5", [raw(flag=b"S", at_386=b"\xff" * 24, at_483=b"\x80" + b"\xff" * 11)], "sparse")
    refused(tmp_path / "6", [raw(flag=b"3", at_329=b"7777777\0")], "impossible device")
    refused(tmp_path / "7", [raw(size=b"0000000000x\0")], "a header with the number")
    refused(tmp_path / "8", [raw(at_108=b"\x80\0\0\x02" + b"\0" * 4)], "an owner that Linux does not know")


def test_damaged_tars(tmp_path: Path) -> None:
    whole = tar([Item(b"a", b"x" * 2000)])
    refused(tmp_path / "1", [whole[:1000]], "ends in the middle of an entry")
    refused(tmp_path / "2", [whole[:100]], "ends in the middle of an entry")
    refused(tmp_path / "3", [b"q" + whole[1:]], "check sum")
    refused(tmp_path / "4", [raw(flag=b"Q")], "unknown type")
    refused(tmp_path / "5", [b"not a tar at all" * 100], "header")


@pytest.mark.parametrize(
    "body",
    [
        b"99 path=x\n",
        b"x path=y\n",
        b"5 a=b\n",
        b"6 =bb\n",
        b"-6 a=b\n",
        b"10 path=\0y\n",
        b"12 size=xxx\n",
        b"13 mtime=1e9\n",
    ],
)
def test_damaged_pax_records(tmp_path: Path, body: bytes) -> None:
    header = raw(flag=b"x", size=b"%011o\0" % len(body))[:512] + body.ljust(512, b"\0") + raw()
    refused(tmp_path, [header], "PAX record" if b"mtime" not in body else "number")


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_cut_streams_whose_digest_is_right(tmp_path: Path, how: str) -> None:
    data = packed(tar([Item(b"a", os.urandom(300_000))]), how)
    refused(tmp_path / "1", [data[:-20]], "", "tar")
    refused(tmp_path / "2", [data[: len(data) // 2]], "", "tar")
    refused(tmp_path / "3", [data[:100] + b"\xff" * 50 + data[150:]], "", "tar")
    if how == "gzip":
        refused(tmp_path / "4", [data + b"garbage"], "gzip", "tar")


def test_a_blob_that_is_not_what_its_digest_says(tmp_path: Path) -> None:
    def damaged(number: int, change: bytes | None) -> Path:
        root = tmp_path / f"{number}{change is None}"
        write_image(root / "oci", [[Item(b"a", os.urandom(50_000))]])
        blob = max((root / "oci/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
        if change is None:
            blob.unlink()
        else:
            blob.write_bytes(change)
        return root / "oci"

    other = gzip.compress(tar([Item(b"b", b"y" * 50_000)]))
    for number, change, part in ((1, other, ""), (2, b"", "ends after 0 of"), (3, None, "cannot be read")):
        layout = damaged(number, change)
        with pytest.raises(BadImage) as caught:
            converted(layout, layout.parent / "image.sqsh")
        assert part in str(caught.value)
        assert not (layout.parent / "image.sqsh").exists()
    for manifest in (tmp_path / "1False/oci/blobs/sha256").iterdir():
        if manifest.stat().st_size < 2000:
            manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(BadImage):
        converted(tmp_path / "1False/oci", tmp_path / "image.sqsh")


def test_bombs(tmp_path: Path) -> None:
    zeros = bytes(64 << 20)
    big = io.BytesIO()
    with tarfile.open(fileobj=big, mode="w") as archive:
        info = tarfile.TarInfo("zeros")
        info.size = len(zeros)
        archive.addfile(info, io.BytesIO(zeros))
    limits = Limits(ratio=400, ratio_from=16 << 20)
    for number, layer in enumerate((gzip.compress(big.getvalue()), zstandard.compress(big.getvalue()))):
        refused(tmp_path / str(number), [layer], "times its size", "tar", limits=limits)
    refused(tmp_path / "size", [big.getvalue()], "unpacks to more than", limits=Limits(bytes=1 << 20))
    refused(
        tmp_path / "many",
        [[Item(b"%d" % number) for number in range(100)]],
        "more than 50 entries",
        limits=Limits(entries=50),
    )


@pytest.mark.parametrize(
    "damage", ["not json", '{"manifests": 1}', '{"manifests": [{"digest": "sha256:../../x", "size": 1}]}']
)
def test_damaged_index(tmp_path: Path, damage: str) -> None:
    write_image(tmp_path / "oci", [[Item(b"a")]])
    (tmp_path / "oci/index.json").write_text(damage)
    with pytest.raises(BadImage, match="cannot be read"):
        converted(tmp_path / "oci", tmp_path / "image.sqsh")


def test_layers_of_unknown_kinds(tmp_path: Path) -> None:
    write_image(tmp_path / "oci", [[Item(b"a")]])
    index = json.loads((tmp_path / "oci/index.json").read_text())
    blobs = tmp_path / "oci/blobs/sha256"
    manifest = json.loads((blobs / index["manifests"][0]["digest"][7:]).read_text())
    manifest["layers"][0]["mediaType"] += "+encrypted"
    raw_manifest = json.dumps(manifest).encode()
    digest = hashlib.sha256(raw_manifest).hexdigest()
    (blobs / digest).write_bytes(raw_manifest)
    index["manifests"][0] |= {"digest": f"sha256:{digest}", "size": len(raw_manifest)}
    (tmp_path / "oci/index.json").write_text(json.dumps(index))
    with pytest.raises(BadImage, match="only tar, gzip and zstd"):
        converted(tmp_path / "oci", tmp_path / "image.sqsh")

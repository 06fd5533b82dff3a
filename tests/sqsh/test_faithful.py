"""What an image may hold comes out as it was; read back with squashfs-tools."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest

from sqsh.convert import Options
from tests.sqsh.layers import (
    EPOCH,
    PLAIN,
    Item,
    converted,
    folder,
    hardlink,
    made,
    packed,
    symlink,
    tar,
    tree,
    unsquashed,
    write_image,
)

pytestmark = [pytest.mark.sqsh, pytest.mark.skipif(os.geteuid() != 0, reason="unpacking with owners needs root")]


def names(root: Path) -> set[bytes]:
    return set(tree(root))


def test_links_across_layers_and_what_becomes_of_them(tmp_path: Path) -> None:
    layers = [
        [Item(b"a", b"lower"), hardlink(b"same", b"a"), Item(b"gone", b"kept by a link")],
        [hardlink(b"across", b"gone"), hardlink(b"again", b"gone")],
        [Item(b".wh.gone"), Item(b"a", b"upper")],
    ]
    found = tree(unsquashed(made(tmp_path, layers), tmp_path / "out"))
    assert found[b"across"][-2] == (b"across", b"again"), "the name that a whiteout took is not the file's only one"
    assert (tmp_path / "out/again").read_bytes() == b"kept by a link"
    assert (tmp_path / "out/same").read_bytes() == b"lower", (
        "its first name is masked, which is known too late: read twice"
    )
    assert (tmp_path / "out/a").read_bytes() == b"upper"


def test_chain_of_links_through_layers(tmp_path: Path) -> None:
    layers = [
        [Item(b"x", b"content")],
        [hardlink(b"y", b"x")],
        [hardlink(b"z", b"y")],
        [Item(b".wh.x"), Item(b".wh.y")],
    ]
    found = tree(unsquashed(made(tmp_path, layers), tmp_path / "out"))
    assert set(found) == {b"z"}
    assert (tmp_path / "out/z").read_bytes() == b"content"


def test_paths_that_change_their_type(tmp_path: Path) -> None:
    layers = [
        [folder(b"was-folder"), Item(b"was-folder/in", b"x"), Item(b"was-file", b"x"), symlink(b"was-link", b"/etc")],
        [Item(b"was-folder", b"now a file"), folder(b"was-file"), folder(b"was-link")],
        [folder(b"was-folder"), Item(b"was-file/in", b"y"), Item(b"was-link/in", b"z")],
    ]
    out = unsquashed(made(tmp_path, layers), tmp_path / "out")
    assert names(out) == {b"was-folder", b"was-file", b"was-file/in", b"was-link", b"was-link/in"}


def test_whiteouts(tmp_path: Path) -> None:
    layers = [
        [folder(b"d"), Item(b"d/old"), Item(b"f"), folder(b"deep"), folder(b"deep/er"), Item(b"deep/er/x")],
        [Item(b"d/.wh..wh..opq"), Item(b"d/new"), Item(b".wh.f"), Item(b".wh.nothing"), Item(b"no/.wh.where")],
        [Item(b"deep/.wh.er"), Item(b".wh..wh.plnk")],
    ]
    assert names(unsquashed(made(tmp_path, layers), tmp_path / "out")) == {b"d", b"d/new", b"deep"}


def test_the_last_of_several_in_one_layer_counts(tmp_path: Path) -> None:
    layers = [
        [Item(b"f", b"first"), folder(b"t"), Item(b"t/x"), Item(b"f", b"second", mode=0o600), Item(b"t", b"file")]
    ]
    out = unsquashed(made(tmp_path, layers), tmp_path / "out")
    assert (out / "f").read_bytes() == b"second"
    assert names(out) == {b"f", b"t"}


def test_a_layer_may_be_empty(tmp_path: Path) -> None:
    layers: list[list[Item] | bytes] = [[Item(b"f", b"x")], [], b"", tar([])]
    assert names(unsquashed(made(tmp_path, layers), tmp_path / "out")) == {b"f"}


def test_special_files_modes_owners_and_attributes(tmp_path: Path) -> None:
    capability = b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    layers = [
        [
            Item(b"null", type=tarfile.CHRTYPE, device=(1, 3), mode=0o666),
            Item(b"disk", type=tarfile.BLKTYPE, device=(259, 70_000)),
            Item(b"pipe", type=tarfile.FIFOTYPE),
            Item(b"sudo", b"x", mode=0o4511, owner=3_000_000_000),
            Item(
                b"ping",
                b"x",
                xattrs={"security.capability": capability, "user.empty": b"", "trusted.overlay.opaque": b"y"},
            ),
            folder(b"d", 0o1777, xattrs={"user.on-folder": b"\0\n=\xff"}),
        ]
    ]
    out = unsquashed(made(tmp_path, layers), tmp_path / "out")
    assert (out / "null").stat().st_rdev == os.makedev(1, 3)
    assert (out / "disk").stat().st_rdev == os.makedev(259, 70_000)
    assert stat.S_ISFIFO((out / "pipe").stat().st_mode)
    assert stat.S_IMODE((out / "sudo").stat().st_mode) == 0o4511
    assert (out / "sudo").stat().st_uid == 3_000_000_000
    assert os.getxattr(out / "ping", "security.capability") == capability
    assert set(os.listxattr(out / "ping")) == {"security.capability", "user.empty"}
    assert os.getxattr(out / "d", "user.on-folder") == b"\0\n=\xff"


def test_long_and_odd_names(tmp_path: Path) -> None:
    long = b"/".join([b"d" * 200] * 5)
    items = [Item(b"x" * 255, b"1"), Item(long, b"2"), Item(b"\xff\xfe \n*", b"3"), symlink(b"l", b"t" * 4000)]
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        root = tmp_path / str(form)
        out = unsquashed(made(root, [tar(items, form)]), root / "out")
        assert (out / os.fsdecode(long)).read_bytes() == b"2"
        assert (out / os.fsdecode(b"\xff\xfe \n*")).read_bytes() == b"3"
        assert (out / ("x" * 255)).read_bytes() == b"1"
        assert len(str((out / "l").readlink())) == 4000


def test_a_folder_of_70000(tmp_path: Path) -> None:
    layers = [[folder(b"many"), *[Item(b"many/%05d" % number, b"%d" % (number % 7)) for number in range(70_000)]]]
    squashfs = made(tmp_path, layers)
    listed = subprocess.run(["unsquashfs", "-ls", squashfs], capture_output=True, check=True).stdout
    assert listed.count(b"squashfs-root/many/") == 70_000
    with mounted(squashfs, tmp_path / "mount") as mount:
        assert (mount / "many/69999").read_bytes() == b"%d" % (69_999 % 7)
        assert (mount / "many/00000").read_bytes() == b"0"
        assert not (mount / "many/70000").exists()


class mounted:  # noqa: N801
    def __init__(self, squashfs: Path, place: Path) -> None:
        self.squashfs, self.place = squashfs, place

    def __enter__(self) -> Path:
        self.place.mkdir()
        words = ["mount", "-o", "loop,ro", "-t", "squashfs", str(self.squashfs), str(self.place)]
        finished = subprocess.run(words, capture_output=True)
        if finished.returncode != 0:
            pytest.skip("this machine mounts no squashfs")
        return self.place

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", self.place], check=True)


def test_the_kernel_reads_it(tmp_path: Path) -> None:
    noise = os.urandom(400_000)
    layers = [
        [
            Item(b"noise", noise),
            Item(b"text", b"some text\n" * 90_000),
            Item(b"hole", bytes(2_000_000)),
            Item(b"small", b"s"),
        ],
        [hardlink(b"noise-too", b"noise"), Item(b"tagged", b"x", xattrs={"user.a": b"1"})],
    ]
    with mounted(made(tmp_path, layers), tmp_path / "mount") as mount:
        assert (mount / "noise").read_bytes() == noise
        assert (mount / "noise").stat().st_nlink == 2
        assert (mount / "text").read_bytes() == b"some text\n" * 90_000
        assert (mount / "hole").read_bytes() == bytes(2_000_000)
        assert (mount / "hole").stat().st_blocks < 100
        assert os.getxattr(mount / "tagged", "user.a") == b"1"


@pytest.mark.parametrize("form", ["gnu", "0.0", "0.1", "1.0"])
def test_sparse_files(tmp_path: Path, form: str) -> None:
    """GNU tar itself writes them: data, a hole larger than a block, more data, a hole at the end."""
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.write(b"begin")
        for place in (3_000_000, 5_000_000, 5_500_000, 6_000_000, 6_500_000, 7_000_000):
            file.seek(place)
            file.write(b"island" * 1000)
        file.truncate(9_000_000)
    (source / "after").write_bytes(b"after")
    option = ["--format=gnu"] if form == "gnu" else ["--format=posix", f"--sparse-version={form}"]
    words = ["tar", *option, "--sparse", "--hole-detection=raw", "-cf", "-", "-C", str(source), "sparse", "after"]
    layer = subprocess.run(words, capture_output=True, check=True).stdout
    assert len(layer) < 1_000_000
    out = unsquashed(made(tmp_path, [layer]), tmp_path / "out")
    assert (out / "sparse").read_bytes() == (source / "sparse").read_bytes()
    assert (out / "after").read_bytes() == b"after"


def test_enroots_rules(tmp_path: Path) -> None:
    layers = [
        [folder(b"dev"), Item(b"dev/null", type=tarfile.CHRTYPE, device=(1, 3)), folder(b"shut", 0o000)],
        [Item(b"shut/program", b"x", mode=0o4011, owner=12), Item(b"shut/data", b"x", mode=0o000, owner=12)],
    ]
    write_image(tmp_path / "oci", layers, {"Env": ["A=1"], "WorkingDir": "/srv/here"})
    converted(tmp_path / "oci", tmp_path / "image.sqsh", Options())
    found = tree(unsquashed(tmp_path / "image.sqsh", tmp_path / "out"))
    assert found[b"shut"][:2] == ("0o40700", 0)
    assert found[b"shut/program"][:2] == ("0o104511", 0)
    assert found[b"shut/data"][:2] == ("0o100400", 0)
    assert b"dev" in found
    assert b"dev/null" not in found
    assert b"srv/here" in found
    assert (tmp_path / "out/etc/environment").read_text() == "A=1\n"
    assert {"rc", "rc.local", "fstab"} <= {path.name for path in (tmp_path / "out/etc").iterdir()}


def test_folders_no_layer_states_have_the_images_time(tmp_path: Path) -> None:
    out = unsquashed(made(tmp_path, [[Item(b"a/b/c", b"x")]]), tmp_path / "out")
    assert (out / "a/b").stat().st_mtime == EPOCH
    assert stat.S_IMODE((out / "a").stat().st_mode) == 0o755


@pytest.mark.parametrize("compressor", ["gzip", "xz"])
def test_other_compressors_and_block_sizes(tmp_path: Path, compressor: str) -> None:
    text = b"".join(b"%d\n" % number for number in range(200_000))
    options = Options(plain=True, keep_owner=True, compressor=compressor, level=1, block_size=1 << 16)
    out = unsquashed(made(tmp_path, [[Item(b"f", text)]], options), tmp_path / "out")
    assert (out / "f").read_bytes() == text


def test_layers_packed_in_any_way(tmp_path: Path) -> None:
    layers = [[Item(b"a", b"1" * 300_000)], [Item(b"b", os.urandom(1000))]]
    outs = [made(tmp_path / how, layers, how=how).read_bytes() for how in ("gzip", "zstd", "tar")]
    assert outs[0] == outs[1] == outs[2]


def test_gzip_of_many_members_and_zstd_of_many_frames(tmp_path: Path) -> None:
    data = tar([Item(b"a", os.urandom(100_000)), Item(b"b", b"2")])
    parts = [data[at : at + 30_000] for at in range(0, len(data), 30_000)]
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 5) + b"extra"
    for name, layer in (
        ("gzip", b"".join(packed(part, "gzip") for part in parts)),
        ("zstd", skippable + b"".join(packed(part, "zstd") for part in parts) + skippable),
    ):
        root = tmp_path / name
        assert names(unsquashed(made(root, [layer], how="tar"), root / "out")) == {b"a", b"b"}


def test_equal_files_are_stored_once(tmp_path: Path) -> None:
    noise = os.urandom(1_000_000)
    once = made(tmp_path / "once", [[Item(b"a", noise)]]).stat().st_size
    twice = made(tmp_path / "twice", [[Item(b"a", noise), Item(b"s", b"s")], [Item(b"b", noise)]])
    assert twice.stat().st_size < once + 9000
    out = unsquashed(twice, tmp_path / "out")
    assert (out / "b").read_bytes() == noise


def test_masked_files_never_go_on(tmp_path: Path) -> None:
    noise = os.urandom(1_000_000)
    layers = [[Item(b"a", noise), folder(b"d"), Item(b"d/b", os.urandom(900_000))], [Item(b"a", b"x"), Item(b".wh.d")]]
    assert made(tmp_path, layers, PLAIN).stat().st_size <= 8192

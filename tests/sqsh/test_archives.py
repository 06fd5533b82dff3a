"""Archives as docker, crane, kaniko, jib and bazel write them, and layers that end or are packed in odd ways."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sqsh.errors import BadImage, SqshError, UsageError
from sqsh.image import find_image
from sqsh.reader import Squashfs
from sqsh.stream import Limits
from sqsh.unpack import unpacked
from tests.sqsh.layers import Item, converted, folder, made, tar, write_image

pytestmark = pytest.mark.sqsh

LOWER = tar([folder(b"etc"), Item(b"etc/hello", b"hello\n"), Item(b"noise", os.urandom(200_000))])
UPPER = tar([Item(b"etc/.wh.hello"), Item(b"top", b"x")])
WANTED = {b"", b"etc", b"noise", b"top"}


def zstd(data: bytes, **words: Any) -> bytes:
    return zstandard.ZstdCompressor(**words).compress(data)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "gzip": gzip.compress,
    "zstd": zstd,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config(*tars: bytes) -> bytes:
    diffs = [f"sha256:{sha256(data)}" for data in tars]
    return json.dumps({"config": {}, "rootfs": {"type": "layers", "diff_ids": diffs}}).encode()


def write_tar(path: Path, members: Mapping[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            if isinstance(data, bytes):
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return path


def write_saved(
    path: Path, members: Mapping[str, bytes | tarfile.TarInfo], layers: Sequence[str] | None, about: bytes
) -> Path:
    entry = {"Config": "config.json", "RepoTags": ["a.io/team/app:1"], "Layers": layers}
    return write_tar(path, {**members, "config.json": about, "manifest.json": json.dumps([entry]).encode()})


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def names(squashfs: Path) -> set[bytes]:
    found = Squashfs(squashfs)
    try:
        return {path for path, _ in found.walk()}
    finally:
        found.close()


@pytest.mark.parametrize("lower", PACKERS)
@pytest.mark.parametrize("upper", ["tar", "gzip"])
def test_compressed_layers(tmp_path: Path, lower: str, upper: str) -> None:
    """What is known of them are the digests of their tars."""
    members = {"a.tar.gz": PACKERS[lower](LOWER), "./b/layer.tar": PACKERS[upper](UPPER)}
    saved = write_saved(tmp_path / "saved.tar", members, ["a.tar.gz", "b/layer.tar"], config(LOWER, UPPER))
    result = converted(saved, tmp_path / "out")
    assert names(result.out) == WANTED
    assert result.digest == f"sha256:{sha256(config(LOWER, UPPER))}"


@pytest.mark.parametrize("how", PACKERS)
def test_a_compressed_layer_that_is_another(tmp_path: Path, how: str) -> None:
    other = tar([Item(b"etc/hello", b"HELLO\n")])
    saved = write_saved(tmp_path / "saved.tar", {"a": PACKERS[how](other)}, ["a"], config(LOWER))
    with pytest.raises(BadImage, match="has other content than its digest says"):
        converted(saved, tmp_path / "out")
    if how != "tar":
        write_saved(saved, {"a": PACKERS[how](LOWER)[:-5]}, ["a"], config(LOWER))
        with pytest.raises(BadImage, match=f"is no valid {how}"):
            converted(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "repeated",
    [
        link(tarfile.LNKTYPE, "one/layer.tar"),
        link(tarfile.LNKTYPE, "./one/layer.tar"),
        link(tarfile.LNKTYPE, "/one/layer.tar"),
        link(tarfile.SYMTYPE, "../one/layer.tar"),
        link(tarfile.SYMTYPE, "/one/layer.tar"),
    ],
)
def test_layers_that_are_saved_once(tmp_path: Path, repeated: tarfile.TarInfo) -> None:
    members: dict[str, bytes | tarfile.TarInfo] = {"one/layer.tar": LOWER, "two/layer.tar": repeated, "top": UPPER}
    layers = ["one/layer.tar", "two/layer.tar", "two/layer.tar", "top"]
    saved = write_saved(tmp_path / "saved.tar", members, layers, config(LOWER, LOWER, LOWER, UPPER))
    assert names(converted(saved, tmp_path / "out").out) == WANTED


@pytest.mark.parametrize("target", ["two", "three", "../../etc/passwd"])
def test_links_in_an_archive_that_lead_nowhere(tmp_path: Path, target: str) -> None:
    members = {"two": link(tarfile.SYMTYPE, target), "three": link(tarfile.LNKTYPE, "two")}
    saved = write_saved(tmp_path / "saved.tar", members, ["two"], config(LOWER))
    with pytest.raises(BadImage, match="the archive is not whole"):
        converted(saved, tmp_path / "out")


def test_an_image_without_layers(tmp_path: Path) -> None:
    null = json.dumps({"rootfs": {"type": "layers", "diff_ids": None}}).encode()
    for about in (config(), null):
        assert names(converted(write_saved(tmp_path / "a.tar", {}, None, about), tmp_path / "out").out) == {b""}


@pytest.mark.parametrize("how", [how for how in PACKERS if how != "tar"])
@pytest.mark.parametrize("kind", ["docker", "oci"])
def test_an_archive_that_is_compressed_as_a_whole(tmp_path: Path, how: str, kind: str) -> None:
    if kind == "docker":
        write_saved(tmp_path / "plain.tar", {"a": gzip.compress(LOWER), "b": UPPER}, ["a", "b"], config(LOWER, UPPER))
    else:
        write_image(tmp_path / "oci", [LOWER, UPPER])
        with tarfile.open(tmp_path / "plain.tar", "w") as archive:
            archive.add(tmp_path / "oci", ".")
    (tmp_path / "whole").write_bytes(PACKERS[how]((tmp_path / "plain.tar").read_bytes()))
    notes: list[str] = []
    image = find_image(str(tmp_path / "whole"), note=notes.append)
    assert "is compressed as a whole" in notes[0]
    assert image.digest == find_image(str(tmp_path / "plain.tar")).digest
    converted(tmp_path / "plain.tar", tmp_path / "wanted")
    assert converted(tmp_path / "whole", tmp_path / "out").out.read_bytes() == (tmp_path / "wanted").read_bytes()
    data = (tmp_path / "whole").read_bytes()
    (tmp_path / "whole").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadImage, match=f"is no valid {how}"):
        find_image(str(tmp_path / "whole"))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is no plain file"):
        find_image(str(tmp_path / "pipe"))


def test_no_room_for_what_an_archive_unpacks_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole"
    whole.write_bytes(gzip.compress(bytes(10 << 20)))
    with pytest.raises(BadImage, match="unpacks to more than 100 times its size"):
        find_image(str(whole), limits=Limits(ratio=100, ratio_from=1 << 20))
    with pytest.raises(UsageError, match="is no image archive"):
        find_image(str(whole))
    monkeypatch.setenv("TMPDIR", "/nowhere")
    with pytest.raises(SqshError, match=r"cannot write to /nowhere.*TMPDIR"):
        find_image(str(whole))


def test_an_archive_that_lacks_the_end_of_its_tar(tmp_path: Path) -> None:
    write_image(tmp_path / "oci", [LOWER, UPPER])
    with tarfile.open(tmp_path / "oci.tar", "w") as archive:
        # The last content must not end in zeros, as a layer may: they would be taken for padding below.
        for path in sorted((tmp_path / "oci").rglob("*"), key=lambda path: path.name == "oci-layout"):
            archive.add(path, path.relative_to(tmp_path / "oci"), recursive=False)
        end = archive.offset
    whole = (tmp_path / "oci.tar").read_bytes()[:end]
    for cut in (whole, whole.rstrip(b"\0"), whole + bytes(512), whole + bytes(100)):
        (tmp_path / "oci.tar").write_bytes(cut)
        assert find_image(str(tmp_path / "oci.tar")).layers
    (tmp_path / "oci.tar").write_bytes(whole.rstrip(b"\0")[:-1])
    with pytest.raises((UsageError, BadImage)):
        converted(tmp_path / "oci.tar", tmp_path / "out")


def test_names_in_an_archive_of_a_newer_docker(tmp_path: Path) -> None:
    write_image(tmp_path / "oci", [LOWER, UPPER])
    index = json.loads((tmp_path / "oci/index.json").read_text())
    annotations = {"io.containerd.image.name": "a.io/team/app:1", "org.opencontainers.image.ref.name": "1"}
    index["manifests"] = [{**index["manifests"][0], "annotations": annotations}]
    (tmp_path / "oci/index.json").write_text(json.dumps(index))
    for name in ("1", "app:1", "team/app:1", "a.io/team/app:1"):
        assert find_image(f"{tmp_path}/oci:{name}").layers
    for name in ("2", "pp:1", "app"):
        with pytest.raises(UsageError, match="no image of the name"):
            find_image(f"{tmp_path}/oci:{name}")


def test_a_layout_of_several_images(tmp_path: Path) -> None:
    write_image(tmp_path / "oci", [LOWER])
    write_image(tmp_path / "other", [UPPER])
    index, other = (json.loads((tmp_path / name / "index.json").read_text()) for name in ("oci", "other"))
    other["manifests"][0]["annotations"] = {"org.opencontainers.image.ref.name": "other"}
    (tmp_path / "oci/index.json").write_text(json.dumps({"manifests": index["manifests"] + other["manifests"]}))
    with pytest.raises(UsageError, match="holds 2 images: name one behind a colon: image, other"):
        find_image(str(tmp_path / "oci"))
    wanted = index["manifests"][0]["digest"]
    for name in ("image", wanted):
        assert find_image(f"{tmp_path}/oci:{name}").digest == wanted
    with pytest.raises(UsageError, match="no image of the name 'mage' there: there is image, other"):
        find_image(f"{tmp_path}/oci:mage")


def test_images_of_one_platform_in_a_layout(tmp_path: Path) -> None:
    """That each states its platform does not say which of them is meant."""
    write_image(tmp_path / "oci", [LOWER])
    write_image(tmp_path / "other", [UPPER])
    entries = [json.loads((tmp_path / name / "index.json").read_text())["manifests"][0] for name in ("oci", "other")]
    for entry, name in zip(entries, ("a.io/app:1", "a.io/app:2"), strict=True):
        entry["annotations"] = {"org.opencontainers.image.ref.name": name}
        entry["platform"] = {"os": "linux", "architecture": "amd64"}
    arm = {**entries[0], "digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "arm64"}}
    (tmp_path / "oci/index.json").write_text(json.dumps({"manifests": [arm, *entries]}))
    with pytest.raises(UsageError, match=r"holds 2 images: name one behind a colon: a\.io/app:1, a\.io/app:2"):
        find_image(str(tmp_path / "oci"), "linux/amd64")
    assert find_image(f"{tmp_path}/oci:app:1", "linux/amd64").digest == entries[0]["digest"]
    entries[1].pop("platform")
    (tmp_path / "oci/index.json").write_text(json.dumps({"manifests": entries}))
    with pytest.raises(UsageError, match="holds 2 images"):
        find_image(str(tmp_path / "oci"), "linux/amd64")


def test_several_images_of_an_archive(tmp_path: Path) -> None:
    """By a name, `latest` where it has no tag, or by the image's ID; one that is listed for each name is one."""
    members = {"a.json": config(LOWER), "b.json": config(UPPER), "a.tar": LOWER, "b.tar": UPPER}
    first, second = (f"sha256:{sha256(members[name])}" for name in ("a.json", "b.json"))
    listed = [
        {"Config": "a.json", "RepoTags": ["a.io/app:1"], "Layers": ["a.tar"]},
        {"Config": "a.json", "RepoTags": ["a.io/app:latest"], "Layers": ["a.tar"]},
        {"Config": "b.json", "RepoTags": None, "Layers": ["b.tar"]},
    ]
    path = write_tar(tmp_path / "two.tar", {**members, "manifest.json": json.dumps(listed).encode()})
    for name, wanted in (("app:1", first), ("app", first), ("a.io/app", first), (first, first), (second, second)):
        assert find_image(f"{path}:{name}").digest == wanted
    with pytest.raises(UsageError, match=f"holds 2 images: name one .*: a.io/app:1, a.io/app:latest, {second}"):
        find_image(str(path))
    one = write_tar(tmp_path / "one.tar", {**members, "manifest.json": json.dumps(listed[:2]).encode()})
    assert find_image(str(one)).digest == first
    none = write_tar(tmp_path / "none.tar", {"manifest.json": b"[]"})
    with pytest.raises(UsageError, match="holds no image"):
        find_image(str(none))


def test_archives_that_are_none_or_too_old(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"saved by Docker before 1\.10"):
        find_image(str(write_tar(tmp_path / "old.tar", {"repositories": b"{}", "a/layer.tar": LOWER})))
    with pytest.raises(UsageError, match="is no image archive"):
        find_image(str(write_tar(tmp_path / "none.tar", {"file": b"{}"})))
    (tmp_path / "text").write_text("text")
    with pytest.raises(UsageError, match="is no image archive"):
        find_image(str(tmp_path / "text"))


END = len(LOWER) - len(LOWER.rstrip(b"\0"))


@pytest.mark.parametrize("how", PACKERS)
def test_layers_without_the_end_of_their_tar(tmp_path: Path, how: str) -> None:
    """Digest and size prove that this is all."""
    content = tar([folder(b"d"), Item(b"d/f", b"x" * 700)])
    last = content.rstrip(b"\0")
    whole = last + bytes(-len(last) % 512)
    ends = {
        "none": whole,
        "no padding": last,
        "half": whole + bytes(512),
        "some": whole + bytes(77),
        "more": content + bytes(77),
    }
    for name, data in ends.items():
        assert names(made(tmp_path / name, [PACKERS[how](data)], how="tar")) == {b"", b"d", b"d/f"}, name
    for name, data in {
        "cut": last[:-1],
        "header": whole + content[:100],
        "long": tar([Item(b"n" * 300)])[:1024],
    }.items():
        with pytest.raises(BadImage, match="ends in the middle of an entry"):
            made(tmp_path / name, [PACKERS[how](data)], how="tar")


class Pieces:
    """Gives bytes in pieces of one size, but for the first."""

    def __init__(self, data: bytes, size: int) -> None:
        self.parts = iter([data[:16], *(data[at : at + size] for at in range(16, len(data), size))])

    def read(self, size: int = 0) -> bytes:
        return next(self.parts, b"")


def result(data: bytes, size: int) -> bytes:
    pieces = Pieces(data, size)
    return b"".join(unpacked(pieces, pieces.read(), "it"))


def streamed(data: bytes) -> bytes:
    """With a block for what comes later, as programs write it that do not know the size."""
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return compressor.compress(data) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + compressor.flush()


SKIPPED = b"\x5f\x2a\x4d\x18" + struct.pack("<I", 300) + bytes(300)
SOME = b"some text " * 30


@pytest.mark.parametrize(
    "frames",
    [
        [zstd(SOME)],
        [zstd(SOME, write_checksum=True, write_content_size=False)],
        [zstd(b""), zstd(SOME, write_checksum=True)],
        [SKIPPED, zstd(SOME), SKIPPED[:8].replace(b"\x2c\x01", b"\0\0")],
        [zstd(bytes(300_000), level=19), zstd(os.urandom(200))],
        [zstd(os.urandom(270), write_checksum=True), SKIPPED, zstd(bytes(140_000))],
        [streamed(os.urandom(300))],
    ],
)
def test_a_zstd_stream_is_whole_where_a_frame_ends(frames: list[bytes]) -> None:
    data = b"".join(frames)
    ends = {sum(map(len, frames[:count])) for count in range(len(frames) + 1)}
    content = result(data, len(data))
    for size in (1, 2, 3, 7, 64):
        assert result(data, size) == content
    for end in range(5, len(data)):
        if end in ends:
            assert content.startswith(result(data[:end], 50))
        else:
            with pytest.raises(BadImage, match="is no valid zstd"):
                result(data[:end], 50)
    for behind in (b"\0", b"garbage", b"\x28\xb5\x2f"):
        with pytest.raises(BadImage, match="is no valid zstd"):
            result(data + behind, 50)


def test_xz_with_padding_and_several_streams() -> None:
    assert result(lzma.compress(b"a") + bytes(8) + lzma.compress(b"b") + bytes(4), 5) == b"ab"
    with pytest.raises(BadImage, match="is no valid xz"):
        result(lzma.compress(b"a") + b"garbage", 50)
    huge = lzma.compress(b"a", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}])
    with pytest.raises(BadImage, match=r"is no valid xz .*[Mm]emory"):
        result(huge, 50)

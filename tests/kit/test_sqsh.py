"""From a tiny image to a squashfs: what is in it, that its bytes depend on the image alone, and what goes wrong."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.conftest import REPO, Kit, convert_layout, refused, running
from tests.kit.tiny_image import Entry, busybox, folder, hardlink, symlink, write_layout

pytestmark = [pytest.mark.sqsh, pytest.mark.skipif(os.geteuid() != 0, reason="unpacking with owners needs root")]

SECRET = "A=`touch /x`"


def listed(squashfs: Path) -> dict[str, list[str]]:
    """Mode, owner, size, date, time by path, as unsquashfs tells it."""
    lines = subprocess.run(
        ["unsquashfs", "-lln", squashfs], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rows = [line.split(maxsplit=5) for line in lines if "squashfs-root" in line]
    return {row[5].removeprefix("squashfs-root").split(" -> ")[0] or "/": row[:5] for row in rows}


def content(squashfs: Path, path: str) -> str:
    return subprocess.run(["unsquashfs", "-cat", squashfs, path], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def squashfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("image")
    lower = [
        *busybox(),
        folder("dev"),
        Entry("dev/leftover", b"x"),
        Entry("removed", b"x"),
        folder("opt"),
        Entry("opt/setuid", b"x", 0o4711, owner=1000),
        Entry("opt/shared-a", b"shared" * 1000, owner=1000),
        hardlink("opt/shared-b", "opt/shared-a"),
        folder("secret", 0o000),
        Entry("secret/write-only", b"x", 0o200),
        Entry("secret/program", b"x", 0o011),
        folder("etc"),
        symlink("etc/environment", "/outside/environment"),
        Entry("etc/rc", b"the image's own", 0o755),
        Entry("sparse", bytes(3_000_000)),
        symlink("way", "/opt"),
        symlink("loop", "loop"),
        Entry("pipe", type=tarfile.FIFOTYPE),
    ]
    upper = [Entry(".wh.removed"), folder("opt"), Entry("opt/on-top", b"y")]
    config = {
        "Env": [SECRET],
        "User": "nobody",
        "WorkingDir": "/way/in",
        "Entrypoint": ["/bin/env"],
        "Volumes": {"/data/new": {}, "/etc": {}, "/etc/rc/no": {}, "/loop/x": {}},
    }
    write_layout(root / "oci", [lower, upper], config, docker=True)
    return convert_layout(root / "oci", root / "image.sqsh")


def test_tree_is_the_image_under_enroots_rules(squashfs: Path) -> None:
    tree = listed(squashfs)
    assert tree["/opt/setuid"][0] == "-rws--x--x"
    assert tree["/secret"][0] == "drwx------"
    assert tree["/secret/write-only"][0] == "-rw-------"
    assert tree["/secret/program"][0] == "-r-x--x--x"
    assert {row[1] for row in tree.values()} == {"0/0"}
    assert "/removed" not in tree
    assert "/dev/leftover" not in tree
    assert tree["/opt/on-top"][2] == "1"
    assert tree["/pipe"][0].startswith("p")
    assert tree["/opt/in"][0].startswith("d"), "a working directory behind a link is made inside the image"
    assert tree["/etc/environment"][0].startswith("-"), "a link is replaced, not followed"
    assert "/outside" not in tree
    assert tree["/data/new"][0] == "drwxr-xr-x", "a volume's folder is made"


def test_times_are_the_images(squashfs: Path) -> None:
    tree = listed(squashfs)
    del tree["/"]  # in no layer of this image: umoci gives it 1970
    assert {" ".join(row[3:5]) for row in tree.values()} == {"2023-11-14 22:13"}


def test_it_names_the_image_and_starts_it(squashfs: Path) -> None:
    image = json.loads(content(squashfs, "opt/release/image.json"))
    digest = json.loads((squashfs.parent / "oci/index.json").read_text())["manifests"][0]["digest"]
    assert image == {
        "digest": digest,
        "name": "tiny",
        "media_type": "application/vnd.docker.distribution.manifest.v2+json",
    }
    assert content(squashfs, "etc/environment") == SECRET + "\n"
    assert "exec '/bin/env' \"$@\"" in content(squashfs, "etc/rc")


def test_hard_links_stay(squashfs: Path, tmp_path: Path) -> None:
    subprocess.run(["unsquashfs", "-quiet", "-no-progress", "-d", tmp_path / "out", squashfs, "opt"], check=True)
    assert (tmp_path / "out/opt/shared-a").stat().st_ino == (tmp_path / "out/opt/shared-b").stat().st_ino


def test_same_bytes_from_another_place_and_with_one_processor(squashfs: Path, tmp_path: Path) -> None:
    shutil.copytree(squashfs.parent / "oci", tmp_path / "elsewhere")
    script = f"""
from pathlib import Path
from tests.kit.conftest import convert_layout
convert_layout(Path({str(tmp_path / "elsewhere")!r}), Path({str(tmp_path / "again.sqsh")!r}))
"""
    subprocess.run(["taskset", "--cpu-list", "0", sys.executable, "-c", script], cwd=REPO, check=True)
    assert (tmp_path / "again.sqsh").read_bytes() == squashfs.read_bytes()


def test_station_records_keeps_and_makes_anew(kit: Kit) -> None:
    digest = kit.release("small", [busybox()])
    squashfs = kit.root / "dist/small/small.sqsh"
    first = kit("sqsh", "--name", "small", "--json")
    assert first.returncode == 0, first.stderr
    section = json.loads((kit.root / "dist/small/record.json").read_text())["sqsh"]
    assert json.loads(first.stdout) == section
    assert section["source_digest"] == digest
    assert section["size"] == squashfs.stat().st_size
    assert set(section["tools"]) == {"sqsh", "compressor"}

    made = squashfs.stat().st_mtime_ns
    again = kit("sqsh", "--name", "small")
    assert "already and is unchanged: kept" in again.stderr
    assert squashfs.stat().st_mtime_ns == made

    squashfs.write_bytes(squashfs.read_bytes()[:-1] + b"x")
    mended = kit("sqsh", "--name", "small")
    assert mended.returncode == 0
    assert "kept" not in mended.stderr
    assert json.loads((kit.root / "dist/small/record.json").read_text())["sqsh"]["sha256"] == section["sha256"]
    assert leftovers(kit) == []


def test_a_layout_of_its_own_needs_no_record(kit: Kit, tmp_path: Path) -> None:
    write_layout(tmp_path / "oci", [busybox()])
    finished = kit("sqsh", tmp_path / "oci", "--name", "other")
    assert finished.returncode == 0, finished.stderr
    assert (kit.root / "dist/other/other.sqsh").exists()
    assert not (kit.root / "dist/other/record.json").exists()


def test_options_are_recorded_and_the_result_is_held_against_the_layers(kit: Kit) -> None:
    kit.release("small", [busybox()])
    chosen = ("--compressor", "gzip", "--level", "1", "--block-size", "65536", "--keep-owner", "--no-cache")
    made = kit("sqsh", "--name", "small", *chosen, "--processors", "1", "--verify")
    assert made.returncode == 0, made.stderr
    assert re.search(r"Verify small.sqsh against the layers .*\d+ entries", made.stderr)
    assert not (kit.root / ".state/sqsh-cache").exists()
    options = json.loads((kit.root / "dist/small/record.json").read_text())["sqsh"]["options"]
    assert options == {"compressor": "gzip", "level": "1", "block_size": "65536", "owner": "kept"}
    superblock = (kit.root / "dist/small/small.sqsh").read_bytes()[:96]
    assert struct.unpack_from("<IIH", superblock, 12)[::2] == (65536, 1)
    other = kit("sqsh", "--name", "small")
    assert "kept" not in other.stderr, "other options are another squashfs"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--compressor", "lzo"], "unknown compressor 'lzo': choose "),
        (["--level", "40"], "zstd has no level 40: choose 1 to 22"),
        (["--block-size", "5000"], "no squashfs has blocks of 5000 bytes"),
        (["--platform", "linux"], "'linux' is no platform"),
        (["--platform", "linux/s390x"], "not for linux/s390x"),
    ],
)
def test_options_that_make_no_sense(kit: Kit, words: list[str], part: str) -> None:
    kit.release("small", [busybox()])
    refused(kit("sqsh", "--name", "small", *words), 2, part)
    assert leftovers(kit) == []


def noise(megabytes: int) -> list[Entry]:
    """Files that no compression makes smaller."""
    return [Entry(f"noise{number}", os.urandom(1_000_000)) for number in range(megabytes)]


def leftovers(kit: Kit) -> list[str]:
    return [path.name for path in (kit.root / "dist").glob("*/.*")]


@pytest.mark.faults
class TestBadDays:
    def test_no_image(self, kit: Kit) -> None:
        refused(kit("sqsh"), 2, "no image at", "./build.py image")

    def test_no_layout_there(self, kit: Kit) -> None:
        refused(kit("sqsh", "/nowhere/oci"), 2, "no OCI layout at /nowhere/oci")

    def test_an_image_that_is_not_the_releases(self, kit: Kit, tmp_path: Path) -> None:
        kit.release("small", [busybox()])
        write_layout(tmp_path / "oci", [busybox(), []])
        refused(kit("sqsh", tmp_path / "oci", "--name", "small"), 2, "but release 'small' is sha256:", "--name")

    def test_registry_down(self, kit: Kit) -> None:
        refused(kit("sqsh", f"127.0.0.1:9/x@sha256:{'0' * 64}"), 1, "Connection refused", "see that the registry is up")

    @pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
    def test_damaged_layer(self, kit: Kit, damage: str) -> None:
        kit.release("small", [busybox()])
        blobs = sorted((kit.root / "dist/small/oci/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
        layer = blobs[-1]
        if damage == "missing":
            layer.unlink()
        elif damage == "truncated":
            layer.write_bytes(layer.read_bytes()[:-1000])
        else:
            layer.write_bytes(gzip.compress(gzip.decompress(layer.read_bytes()) + bytes(512)))
        refused(kit("sqsh", "--name", "small"), 1, "sha256")
        assert leftovers(kit) == []
        assert not (kit.root / "dist/small/small.sqsh").exists()

    def test_disk_full_leaves_the_earlier_squashfs(self, kit: Kit, small_disk: Path) -> None:
        kit.release("small", [busybox()])
        assert kit("sqsh", "--name", "small").returncode == 0
        kept = (kit.root / "dist/small/small.sqsh").read_bytes()
        for path in (kit.root / "dist/small/record.json", kit.root / "dist/small/oci"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        kit.release("small", [[*busybox(), *noise(40)]])
        refused(kit("sqsh", "--name", "small"), 1, "no space left on device for", "make room")
        assert (kit.root / "dist/small/small.sqsh").read_bytes() == kept
        assert leftovers(kit) == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    @pytest.mark.parametrize("after_s", [0.0, 0.05, 0.15])
    def test_interrupted(self, kit: Kit, after_s: float, number: signal.Signals) -> None:
        kit.release("big", [[*busybox(), *noise(200)]])
        process = kit.start("sqsh", "--name", "big")
        assert process.stderr is not None
        for line in process.stderr:
            if "Convert" in line:
                break
        time.sleep(after_s)
        process.send_signal(number)
        rest = process.communicate(timeout=30)[1]
        assert process.returncode == 1
        assert rest.splitlines()[-1] == "error: interrupted; earlier artifacts are as they were"
        assert leftovers(kit) == []
        assert not (kit.root / "dist/big/big.sqsh").exists()
        assert running(kit.root) == []

    def test_killed_outright_and_run_again(self, kit: Kit) -> None:
        kit.release("big", [[*busybox(), *noise(60)]])
        process = kit.start("sqsh", "--name", "big")
        assert process.stderr is not None
        for line in process.stderr:
            if "Convert" in line:
                break
        while not leftovers(kit):
            time.sleep(0.001)
        process.kill()
        process.communicate()
        wait_until_quiet(kit.root)
        assert leftovers(kit) != []
        assert kit("sqsh", "--name", "big").returncode == 0
        assert leftovers(kit) == []

    def test_second_run_while_one_is_running(self, kit: Kit) -> None:
        kit.release("big", [[*busybox(), *noise(60)]])
        process = kit.start("sqsh", "--name", "big")
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGSTOP)
        refused(kit("sqsh", "--name", "big"), 1, "another 'sqsh-big' is running here", str(process.pid))
        process.send_signal(signal.SIGCONT)
        process.communicate()
        assert process.returncode == 0


@pytest.fixture
def small_disk(kit: Kit) -> Iterator[Path]:
    """dist on a file system of its own with 64 MB."""
    folder = kit.root / "dist"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def wait_until_quiet(root: Path) -> None:
    deadline = time.monotonic() + 20
    while running(root) and time.monotonic() < deadline:
        time.sleep(0.05)

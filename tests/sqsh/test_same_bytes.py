"""The bytes depend on the image and the options alone: not on cores, source, cache, time or place."""

from __future__ import annotations

import errno
import http.server
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sqsh import writer
from sqsh.convert import Options, convert
from sqsh.copier import Copier
from sqsh.errors import BadImage, SqshError, UsageError
from sqsh.stream import Limits
from tests.sqsh.layers import PLAIN, Item, converted, folder, hardlink, tree, unsquashed, write_image

pytestmark = pytest.mark.sqsh
REPO = Path(__file__).resolve().parents[2]


def files(seed: int, count: int, prefix: bytes) -> list[Item]:
    """Small and large files, some alike, that compress somewhat."""
    chance = random.Random(seed)
    items = [folder(prefix)]
    for number in range(count):
        size = chance.choice([0, 10, 3000, 40_000, 131_072, 500_000])
        word = chance.randbytes(chance.choice([2, 50, 2000]))
        items.append(Item(b"%s/%d" % (prefix, number), (word * (size // len(word) + 1))[:size]))
    return items


def layers() -> list[list[Item]]:
    lower = [*files(1, 120, b"lower"), hardlink(b"lower/link", b"lower/7")]
    upper = [Item(b"lower/3", b"replaced"), Item(b"lower/.wh.9"), *files(2, 60, b"upper"), *files(1, 20, b"twins")]
    return [lower, upper]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("image")
    write_image(root / "oci", layers(), {"Entrypoint": ["/bin/sh"]})
    converted(root / "oci", root / "image.sqsh", Options())
    return root


def test_with_any_number_of_processors(image: Path, tmp_path: Path) -> None:
    for count in (1, 2, 7):
        converted(image / "oci", tmp_path / "out", Options(processors=count))
        assert (tmp_path / "out").read_bytes() == (image / "image.sqsh").read_bytes()


def test_from_the_command_line_on_one_core(image: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sqsh", str(image / "oci"), str(tmp_path / "out"), "--no-cache"]
    finished = subprocess.run(["taskset", "-c", "0", *words], cwd=REPO, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "out").read_bytes() == (image / "image.sqsh").read_bytes()


def test_from_archives(image: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "oci.tar", "w") as archive:
        archive.add(image / "oci", ".")
    converted(tmp_path / "oci.tar", tmp_path / "out", Options())
    assert (tmp_path / "out").read_bytes() == (image / "image.sqsh").read_bytes()


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")
def test_from_a_classic_docker_archive(image: Path, tmp_path: Path) -> None:
    """It holds no manifest, so image.json can only name the configuration; all else is the same."""
    command = ["skopeo", "copy", f"oci:{image / 'oci'}:image", f"docker-archive:{tmp_path / 'saved.tar'}:some/name:tag"]
    subprocess.run(command, check=True, capture_output=True)
    for text in ("saved.tar", "saved.tar:some/name:tag"):
        result = converted(tmp_path / text, tmp_path / "out", PLAIN)
        converted(image / "oci", tmp_path / "wanted", PLAIN)
        assert (tmp_path / "out").read_bytes() == (tmp_path / "wanted").read_bytes()
        assert result.digest.startswith("sha256:")
    with pytest.raises(UsageError, match="no image of the name"):
        converted(tmp_path / "saved.tar:other", tmp_path / "out")


class Registry(http.server.BaseHTTPRequestHandler):
    """Serves one layout by the protocol's read half; breaks off in the middle of large blobs, once each."""

    layout: Path
    token = ""
    broken: set[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/token"):
            self._send(200, b'{"token": "secret"}')
            return
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            realm = f"http://{self.headers['Host']}/token"
            self._send(401, b"", {"WWW-Authenticate": f'Bearer realm="{realm}",service="here"'})
            return
        name = self.path.rpartition("/")[2]
        if not name.startswith("sha256:"):
            name = json.loads((self.layout / "index.json").read_text())["manifests"][0]["digest"]
        path = self.layout / "blobs" / name.replace(":", "/")
        if not path.exists():
            self._send(404, b"")
            return
        data = path.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        kind = (
            "application/vnd.oci.image.manifest.v1+json" if "/manifests/" in self.path else "application/octet-stream"
        )
        cut = len(data) > 100_000 and name not in self.broken
        self.broken.add(name)
        self._send(206 if start else 200, data[start:], {"Content-Type": kind}, len(data) // 2 if cut else None)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry(image: Path) -> Iterator[str]:
    handler = type("Handler", (Registry,), {"layout": image / "oci", "broken": set()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("token", ["", "secret"])
def test_from_a_registry_whose_connections_break(
    image: Path, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr(Registry, "token", token)
    digest = converted(image / "oci", tmp_path / "layout", Options()).digest
    for reference in (f"{registry}/some/image:tag", f"docker://{registry}/some/image@{digest}"):
        result = converted(reference, tmp_path / "out", Options())
        assert result.digest == digest
        assert (tmp_path / "out").read_bytes() == (image / "image.sqsh").read_bytes()


def test_a_registry_that_lies_or_is_not_there(registry: str, tmp_path: Path) -> None:
    with pytest.raises(SqshError, match="answers 404"):
        converted(f"{registry}/some/image@sha256:{'0' * 64}", tmp_path / "out")
    with pytest.raises(SqshError, match="cannot reach"):
        converted("127.0.0.1:9/some/image:tag", tmp_path / "out")
    with pytest.raises(UsageError, match="no image reference"):
        converted(f"{registry}/Some Image", tmp_path / "out")


class TestCache:
    def options(self, place: Path) -> Options:
        return Options(cache=place / "cache")

    def test_a_second_conversion_copies(self, image: Path, tmp_path: Path) -> None:
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        result = converted(image / "oci", tmp_path / "2", self.options(tmp_path))
        assert result.layers_copied == 2
        assert (tmp_path / "2").read_bytes() == (image / "image.sqsh").read_bytes()

    @pytest.mark.parametrize(
        "change",
        [
            [Item(b"new", b"file")],
            [Item(b"lower/20", b"changed"), Item(b"upper/.wh.5")],
            [Item(b".wh.lower"), Item(b"upper/.wh..wh..opq")],
            [hardlink(b"to-lower", b"lower/7"), Item(b".wh.lower")],
        ],
    )
    def test_a_layer_on_top(self, image: Path, tmp_path: Path, change: list[Item]) -> None:
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        write_image(tmp_path / "oci", [*layers(), change])
        converted(tmp_path / "oci", tmp_path / "fresh", Options())
        result = converted(tmp_path / "oci", tmp_path / "2", self.options(tmp_path))
        assert result.layers_copied == 2
        assert (tmp_path / "2").read_bytes() == (tmp_path / "fresh").read_bytes()

    def test_what_was_masked_shows_again(self, image: Path, tmp_path: Path) -> None:
        """The index lists the file, but the output lacks its content: it is read from the layer."""
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        write_image(tmp_path / "oci", layers()[:1])
        converted(tmp_path / "oci", tmp_path / "fresh", Options())
        result = converted(tmp_path / "oci", tmp_path / "2", self.options(tmp_path))
        assert result.layers_copied == 0
        assert (tmp_path / "2").read_bytes() == (tmp_path / "fresh").read_bytes()

    @pytest.mark.parametrize("damage", ["gone", "cut", "block", "index", "places"])
    def test_earlier_outputs_that_have_changed(self, image: Path, tmp_path: Path, damage: str) -> None:
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        status = (tmp_path / "1").stat()
        if damage == "gone":
            (tmp_path / "1").unlink()
        elif damage == "cut":
            os.truncate(tmp_path / "1", 10_000)
        elif damage == "block":
            with (tmp_path / "1").open("r+b") as file:
                file.seek(5000)
                file.write(b"damage")
            os.utime(tmp_path / "1", ns=(status.st_atime_ns, status.st_mtime_ns))
        else:
            for path in (tmp_path / "cache").iterdir():
                index = path.read_bytes()
                path.write_bytes(index[:-10] if damage == "index" else index[:-10] + b"x" + index[-9:])
        result = converted(image / "oci", tmp_path / "2", self.options(tmp_path))
        assert result.layers_copied == 0
        assert (tmp_path / "2").read_bytes() == (image / "image.sqsh").read_bytes()

    def test_an_index_with_any_byte_flipped(self, tmp_path: Path) -> None:
        write_image(tmp_path / "oci", [[Item(b"a", b"text"), Item(b"b", bytes(range(256)) * 600)]])
        converted(tmp_path / "oci", tmp_path / "1", self.options(tmp_path))
        (index,) = (tmp_path / "cache").iterdir()
        whole = index.read_bytes()
        for place in range(len(whole)):
            index.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
            convert(str(tmp_path / "oci"), tmp_path / "2", self.options(tmp_path))
            assert (tmp_path / "2").read_bytes() == (tmp_path / "1").read_bytes()

    def test_an_earlier_output_that_cannot_be_read(
        self, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Seen where a fragment is taken apart; for blocks see test_copier.py."""
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        write_image(tmp_path / "oci", [*layers(), [Item(b"lower/.wh.%d" % number) for number in range(9)]])
        converted(tmp_path / "oci", tmp_path / "fresh", Options())

        def stale(*_: object) -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(os, "preadv", stale)
        result = convert(str(tmp_path / "oci"), tmp_path / "2", self.options(tmp_path))
        assert result.layers_copied == 0
        assert (tmp_path / "2").read_bytes() == (tmp_path / "fresh").read_bytes()

    @pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python"])
    def test_where_nothing_can_be_copied(
        self, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
    ) -> None:
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        monkeypatch.setattr(sys, "executable", python)
        notes: list[str] = []
        result = convert(str(image / "oci"), tmp_path / "2", replace(self.options(tmp_path), note=notes.append))
        assert (result.layers_copied, len(notes)) == (0, 1)
        assert (tmp_path / "2").read_bytes() == (image / "image.sqsh").read_bytes()

    def test_out_of_handles_nothing_is_copied(
        self, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_more(*_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        monkeypatch.setattr(socket, "socketpair", no_more)
        assert convert(str(image / "oci"), tmp_path / "2", self.options(tmp_path)).layers_copied == 0
        assert (tmp_path / "2").read_bytes() == (image / "image.sqsh").read_bytes()

    def test_modules_may_come_from_any_path(self, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The copying process looks where this one does, which an environment variable could not say."""
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        (tmp_path / "a:b").symlink_to(REPO)
        paths = [Path("/nowhere"), str(tmp_path / "a:b"), *(path for path in sys.path if path not in ("", str(REPO)))]
        monkeypatch.setattr(sys, "path", paths)
        monkeypatch.chdir(tmp_path)
        assert convert(str(image / "oci"), tmp_path / "2", self.options(tmp_path)).layers_copied == 2

    def test_a_copy_that_stands_still_can_be_interrupted(
        self, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        copiers: list[Copier] = []
        copy = Copier.copy

        def stopped(copier: Copier, *words: int) -> None:
            os.kill(copier._process.pid, signal.SIGSTOP)
            copiers.append(copier)
            copy(copier, *words)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Copier, "copy", stopped)
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1)
        try:
            with pytest.raises(KeyboardInterrupt):
                convert(str(image / "oci"), tmp_path / "2", self.options(tmp_path))
        finally:
            signal.signal(signal.SIGALRM, before)
        assert copiers[0]._process.returncode == -signal.SIGKILL
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "cache"]

    def test_a_cached_layer_has_no_more_entries_than_allowed(self, image: Path, tmp_path: Path) -> None:
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        with pytest.raises(BadImage, match="has more than 2 entries"):
            convert(str(image / "oci"), tmp_path / "2", replace(self.options(tmp_path), limits=Limits(entries=2)))

    def test_other_options_share_nothing(self, image: Path, tmp_path: Path) -> None:
        converted(image / "oci", tmp_path / "1", self.options(tmp_path))
        result = converted(image / "oci", tmp_path / "2", replace(self.options(tmp_path), level=3))
        assert result.layers_copied == 0

    def test_it_keeps_to_its_size(self, image: Path, tmp_path: Path) -> None:
        converted(image / "oci", tmp_path / "1", replace(self.options(tmp_path), cache_size=6000))
        assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 6000

    def test_over_itself_and_two_at_once(self, image: Path, tmp_path: Path) -> None:
        converted(image / "oci", tmp_path / "out", self.options(tmp_path))
        words = [
            sys.executable,
            "-m",
            "sqsh",
            str(image / "oci"),
            str(tmp_path / "out"),
            "--cache",
            str(tmp_path / "cache"),
            "--quiet",
        ]
        both = [subprocess.Popen(words, cwd=REPO) for _ in range(2)]
        assert [process.wait() for process in both] == [0, 0]
        assert (tmp_path / "out").read_bytes() == (image / "image.sqsh").read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out"]


def test_whatever_goes_wrong_in_the_writers_thread_ends_the_conversion(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(writer, "write_all", fail)
    with pytest.raises(MemoryError):
        convert(str(image / "oci"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_in_the_background(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says only once that something was not written."""
    real, calls = os.fdatasync, []

    def fail_once(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(handle)

    monkeypatch.setattr(writer, "SYNC_SIZE", 1)
    monkeypatch.setattr(os, "fdatasync", fail_once)
    with pytest.raises(SqshError, match="could not be written"):
        convert(str(image / "oci"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_no_more_threads(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    for allowed in range(4):
        left = iter(range(allowed))

        def limited(thread: threading.Thread, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(SqshError, match="no more threads can be started"):
            convert(str(image / "oci"), tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_what_is_in_it(image: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("unpacking needs root")
    found = tree(unsquashed(image / "image.sqsh", tmp_path / "out"))
    assert found[b"lower/link"][-2] == (b"lower/7", b"lower/link")
    assert b"lower/9" not in found
    assert (tmp_path / "out/lower/3").read_bytes() == b"replaced"
    for prefix, seed, count in ((b"lower", 1, 120), (b"upper", 2, 60), (b"twins", 1, 20)):
        for item in files(seed, count, prefix)[1:]:
            if item.name not in (b"lower/3", b"lower/9"):
                assert (tmp_path / "out" / os.fsdecode(item.name)).read_bytes() == item.data

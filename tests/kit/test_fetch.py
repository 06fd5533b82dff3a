"""Fetching: which wheels are named, which are wanted, and what is reused."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from kit import fetch
from kit.bases import Archive, Base, read_bases
from kit.errors import KitError, UsageError
from kit.fetch import Inputs, fetch_inputs, platform_tags
from kit.files import sha256_of, write_atomic
from kit.layout import LOCKFILES, inputs_dir
from kit.lock import SETS, lockfile

pytestmark = pytest.mark.unit


def test_platform_tags_reach_from_the_base_to_the_oldest() -> None:
    tags = platform_tags("2.41")
    assert tags[0].startswith("manylinux_2_41_")
    assert any(tag.startswith("manylinux_2_17_") for tag in tags)
    assert any(tag.startswith("manylinux1_") for tag in tags)
    assert not any(tag.startswith("manylinux_2_42_") for tag in tags)


def test_names_in_what_pip_says() -> None:
    lines = [
        "Saved ./dist/inputs/cpu/wheels/a-1-py3-none-any.whl",
        "  File was already downloaded /x/b-2-py3-none-any.whl",
        "Collecting c==3",
        "  Downloading c-3-py3-none-any.whl (3 kB)",
    ]
    assert set(fetch._named_wheels(lines)) == {"a-1-py3-none-any.whl", "b-2-py3-none-any.whl"}


def test_packages_in_a_dpkg_status() -> None:
    status = "Package: a\nStatus: ok\nVersion: 1-2\nDescription: x\n more: here\n\nPackage: b\nVersion: 3\n\n"
    assert dict(fetch._installed(status)) == {"a": "1-2", "b": "3"}


def test_an_unknown_profile() -> None:
    with pytest.raises(UsageError, match="unknown profile 'gpu'"):
        inputs_dir("gpu")


class TestArchives:
    @pytest.fixture
    def base(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Base]:
        """A base that needs an archive from a server on loopback."""
        (tmp_path / "served").mkdir()
        (tmp_path / "served/etcd.tar.gz").write_bytes(b"archive")
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
        monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self.pin(monkeypatch, f"http://127.0.0.1:{server.server_port}/etcd.tar.gz", sha256(b"archive").hexdigest())
            yield read_bases().cuda
            server.shutdown()

    def pin(self, monkeypatch: pytest.MonkeyPatch, url: str, digest: str) -> None:
        archive = Archive(version="1", url=url, amd64=digest, arm64=digest)
        monkeypatch.setattr(fetch, "read_archives", lambda: {"etcd": archive})

    def test_it_is_brought_and_held_against_its_hash(self, base: Base, tmp_path: Path) -> None:
        assert fetch._fetch_archives(base, tmp_path / "to") == {"etcd-1.tar.gz": sha256(b"archive").hexdigest()}
        assert (tmp_path / "to/etcd-1.tar.gz").read_bytes() == b"archive"

    def test_another_content_is_refused(self, base: Base, tmp_path: Path) -> None:
        (tmp_path / "served/etcd.tar.gz").write_bytes(b"something else")
        with pytest.raises(KitError, match=r"but lockfiles/archives\.toml pins"):
            fetch._fetch_archives(base, tmp_path / "to")
        assert list((tmp_path / "to").iterdir()) == []

    def test_out_of_reach_leaves_it_to_the_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pin(monkeypatch, "http://127.0.0.1:9/etcd.tar.gz", "0" * 64)
        assert fetch._fetch_archives(read_bases().cuda, tmp_path / "to") == {}


class TestReuse:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Complete inputs of the cpu profile, made of nothing."""
        folder = tmp_path / "inputs"
        (folder / "wheels").mkdir(parents=True)
        (folder / "archives").mkdir()
        (folder / "wheels/a-1-py3-none-any.whl").write_bytes(b"wheel")
        (folder / "base.tar").write_bytes(b"base")
        manifest = Inputs(
            locks={one.name: sha256_of(LOCKFILES / f"{one.name}.txt") for one in SETS["cpu"]},
            wheels={"a-1-py3-none-any.whl": 5},
            base=read_bases().cpu.model_copy(update={"image": None}),
            base_sha256=sha256_of(folder / "base.tar"),
            base_size=4,
            base_how=fetch._base_how(read_bases().cpu, read_bases().source_date_epoch),
        )
        write_atomic(folder / "inputs.json", manifest.model_dump_json())
        monkeypatch.setattr(fetch, "inputs_dir", lambda profile: folder)
        monkeypatch.setenv("KIT_STATE", str(tmp_path / "state"))
        monkeypatch.setattr(fetch, "_make_base", lambda *_: pytest.fail("made a base"))
        return folder

    def test_what_two_locks_share_is_asked_for_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def download(requirements: set[str], built: object, base: object, into: Path) -> set[str]:
            asked.extend(requirements)
            return {"a-1-py3-none-any.whl"}

        monkeypatch.setattr(fetch, "_pip_download", download)
        (folder / "wheels/a-1-py3-none-any.whl").write_bytes(b"cut")
        fetch_inputs("cpu")
        wanted = {
            requirement
            for lock in SETS["cpu"]
            for requirement in fetch._requirements(lockfile(lock.name), read_bases().cpu)
        }
        assert sorted(asked) == sorted(wanted)
        assert all("==" in requirement and "--hash=sha256:" in requirement for requirement in asked)

    def test_a_base_to_make_without_root_is_said_before_anything_is_fetched(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (folder / "base.tar").unlink()
        monkeypatch.setattr(fetch, "_pip_download", lambda *_: pytest.fail("downloaded"))
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        with pytest.raises(KitError, match="only root can make the base: run it as root"):
            fetch_inputs("cpu")

    def test_complete_inputs_are_left_alone(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetch, "_pip_download", lambda *_: pytest.fail("downloaded"))
        assert fetch_inputs("cpu").wheels == {"a-1-py3-none-any.whl": 5}

    @pytest.mark.parametrize("damage", ["content", "how"])
    def test_a_base_that_is_not_right_is_made_anew(
        self, folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Path] = []

        def make(base: Base, epoch: int, tar: Path) -> dict[str, str]:
            tar.write_bytes(b"anew")
            made.append(tar)
            return {}

        monkeypatch.setattr(fetch, "_make_base", make)
        monkeypatch.setattr(fetch, "_pip_download", lambda *_: {"a-1-py3-none-any.whl"})
        if damage == "content":
            (folder / "base.tar").write_bytes(b"BASE")
        else:
            monkeypatch.setattr(fetch, "_LEFT_OUT", ())
        assert fetch_inputs("cpu").base_sha256 == sha256(b"anew").hexdigest()
        assert made == [folder / "base.tar"]

    def test_an_archive_with_other_content_is_fetched_again(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetched: list[Path] = []

        def fetch_again(base: Base, into: Path) -> dict[str, str]:
            fetched.append(into)
            return archives

        manifest = Inputs.model_validate_json((folder / "inputs.json").read_bytes())
        archives = {"etcd-1.tar.gz": sha256(b"archive").hexdigest()}
        write_atomic(folder / "inputs.json", manifest.model_copy(update={"archives": archives}).model_dump_json())
        monkeypatch.setattr(fetch, "_pip_download", lambda *_: {"a-1-py3-none-any.whl"})
        monkeypatch.setattr(fetch, "_fetch_archives", fetch_again)
        (folder / "archives/etcd-1.tar.gz").write_bytes(b"archive")
        fetch_inputs("cpu")
        assert fetched == []
        (folder / "archives/etcd-1.tar.gz").write_bytes(b"ARCHIVE")
        fetch_inputs("cpu")
        assert fetched == [folder / "archives"]

    @pytest.mark.parametrize("damage", ["cut", "missing", "stray", "manifest"])
    def test_a_wheel_that_is_not_right_is_fetched_again(
        self, folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wheel = folder / "wheels/a-1-py3-none-any.whl"
        if damage == "cut":
            wheel.write_bytes(b"whe")
        elif damage == "missing":
            wheel.unlink()
        elif damage == "stray":
            (folder / "wheels/b-1-py3-none-any.whl").write_bytes(b"of an earlier lock")
        else:
            (folder / "inputs.json").write_text('{"version": "of an earlier kit"}')
            monkeypatch.setattr(fetch, "_make_base", lambda base, epoch, tar: {})

        def download(requirements: set[str], built: object, base: object, into: Path) -> set[str]:
            (into / wheel.name).write_bytes(b"wheel")
            return {wheel.name}

        monkeypatch.setattr(fetch, "_pip_download", download)
        fetch_inputs("cpu")
        assert [path.name for path in (folder / "wheels").iterdir()] == [wheel.name]
        assert wheel.read_bytes() == b"wheel"
        monkeypatch.setattr(fetch, "_pip_download", lambda *_: pytest.fail("downloaded"))
        fetch_inputs("cpu")

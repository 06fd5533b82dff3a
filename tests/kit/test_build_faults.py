"""Failures of the image's stages: each gives one line of error, keeps earlier artifacts, and leaves nothing running."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.errors import KitError
from kit.files import need_space
from kit.layout import REPO, inputs_dir, only_run, state_dir
from tests.kit.conftest import Kit, refused
from tests.kit.tiny_image import Entry

REAL_STATE = state_dir()
NAME = f"faults-{os.getpid()}"
"""The release that builds here make, apart from any other test run's in this tree."""
pytestmark = pytest.mark.faults


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    root = tmp_path / "copy"
    shutil.copytree(REPO / "kit", root / "kit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPO / "lockfiles", root / "lockfiles")
    shutil.copy(REPO / "build.py", root)
    return Kit(root)


class TestPush:
    @pytest.fixture
    def released(self, kit: Kit) -> Kit:
        kit.release("cpu", [[Entry("a", b"a")]])
        return kit

    def test_nothing_made_yet(self, kit: Kit) -> None:
        refused(kit("push", "127.0.0.1:9/a:b"), 1, "no record at", "make the image first")

    def test_registry_down(self, released: Kit) -> None:
        refused(released("push", "127.0.0.1:9/a:b"), 1, "skopeo copy failed", "connection refused", "registry is up")

    def test_registry_refusing(self, released: Kit, refusing_registry: str) -> None:
        before = (released.root / "dist/cpu/record.json").read_bytes()
        refused(released("push", f"{refusing_registry}/a:b"), 1, "skopeo copy failed", "skopeo login")
        assert (released.root / "dist/cpu/record.json").read_bytes() == before

    def test_a_layout_that_is_not_the_recorded_one(self, released: Kit) -> None:
        shutil.rmtree(released.root / "dist/cpu/oci")
        from tests.kit.tiny_image import write_layout

        write_layout(released.root / "dist/cpu/oci", [[Entry("b", b"b")]], docker=True)
        refused(released("push", "127.0.0.1:9/a:b"), 1, "but the record says sha256:", "make the image again")

    def test_ended_while_the_registry_keeps_us_waiting(self, released: Kit) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            process = released.start("push", f"127.0.0.1:{silent.getsockname()[1]}/a:b")
            silent.accept()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=20)
        refused(subprocess.CompletedProcess("push", process.returncode, out, err), 1, "interrupted")

    @pytest.fixture
    def refusing_registry(self) -> Iterator[str]:
        class Refuse(http.server.BaseHTTPRequestHandler):
            def do_any(self) -> None:
                self.send_response(403)
                self.end_headers()

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"127.0.0.1:{server.server_port}"
            server.shutdown()


class TestImage:
    def test_an_unknown_profile_or_name_is_bad_usage(self, kit: Kit) -> None:
        refused(kit("image", "--profile", "gpu"), 2, "unknown profile 'gpu'", "cpu, cuda")
        refused(kit("image", "--name", "inputs"), 2, "'inputs' cannot name a release")

    def test_an_index_that_is_down(self, kit: Kit) -> None:
        dead = {
            **kit.env,
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_RETRIES": "0",
            "PIP_CONFIG_FILE": os.devnull,
        }
        dead = {name: value for name, value in dead.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
        finished = subprocess.run(kit.argv("fetch"), env=dead, capture_output=True, text=True, timeout=120)
        refused(finished, 1, "pip failed", "check pip's index configuration")

    def test_garbage_in_bases(self, kit: Kit) -> None:
        (kit.root / "lockfiles/bases.toml").write_text("source_date_epoch = [")
        refused(kit("fetch"), 2, "bases.toml", "correct the file")

    def test_no_room_is_said_before_anything_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(KitError, match=r"building needs about 1000000 GB .* GB are free: make room"):
            need_space(tmp_path / "not/yet/there", 10**15, "building")

    def test_a_second_run_while_one_is_running(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KIT_STATE", str(tmp_path))
        hold = "with only_run('image-x'): print('in', flush=True); time.sleep(60)"
        holder = f"import time; from kit.layout import only_run\n{hold}"
        with subprocess.Popen([sys.executable, "-c", holder], cwd=REPO, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            first.stdout.readline()
            with pytest.raises(KitError, match=rf"another 'image-x' is running here \(process {first.pid}\)"):  # noqa: SIM117
                with only_run("image-x"):
                    pass
            first.kill()
        with only_run("image-x"):
            pass


@pytest.mark.image
@pytest.mark.skipif(
    not (inputs_dir("cpu") / "inputs.json").exists() or not (REAL_STATE / "engine").exists(),
    reason="needs ./build.py fetch and the kit's own engine",
)
class TestBuildWithOurEngine:
    """In this tree, with a state folder of the test's own and a release that is removed afterwards."""

    @pytest.fixture
    def state(self, tmp_path: Path) -> Iterator[Path]:
        state = tmp_path / "state"
        state.mkdir()
        for tools in ("engine", "runtime"):
            (state / tools).symlink_to(REAL_STATE / tools)
        (state / "engine.kind").write_text("own\n")
        shutil.copy(REAL_STATE / "version", state / "version")
        yield state
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        mounts = Path("/proc/self/mountinfo").read_text()
        shutil.rmtree(REPO / "dist" / NAME, ignore_errors=True)
        assert str(tmp_path) not in left
        assert str(state / "docker") not in mounts

    def start(self, state: Path) -> subprocess.Popen[str]:
        env = {**os.environ, "KIT_STATE": str(state)}
        argv = [sys.executable, "build.py", "image", "--name", NAME]
        return subprocess.Popen(argv, cwd=REPO, env=env, stderr=subprocess.PIPE, text=True)

    @pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
    def test_interrupted_while_it_builds(self, state: Path, sign: signal.Signals) -> None:
        oci = REPO / "dist" / NAME / "oci"
        oci.mkdir(parents=True)
        (oci / "index.json").write_text("earlier")
        log = state / f"logs/image-{NAME}.log"
        with self.start(state) as process:
            while not log.exists() or "[internal] load build context" not in log.read_text():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(sign)
            assert process.stderr is not None
            said = process.stderr.read().splitlines()
        assert process.returncode == 1
        assert [line for line in said if line.startswith("error:")] == [said[-1]]
        assert "interrupted" in said[-1]
        assert (oci / "index.json").read_text() == "earlier"
        assert sorted(path.name for path in oci.parent.iterdir()) == ["oci"]

    def test_the_disk_fills_up(self, state: Path) -> None:
        """Past the check beforehand, as when others fill the disk meanwhile: the engine's data are on 200 MB."""
        data = state / "docker"
        data.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(data)], check=True)
        try:
            with self.start(state) as process:
                assert process.stderr is not None
                said = process.stderr.read().splitlines()
        finally:
            subprocess.run(["umount", str(data)], check=True)
        assert process.returncode == 1
        assert "no space left on device" in said[-1]
        assert said[-1].startswith("error: docker buildx build failed: ")

    def test_a_state_folder_of_another_version(self, state: Path) -> None:
        (state / "version").write_text("0\n")
        with self.start(state) as process:
            assert process.stderr is not None
            said = process.stderr.read().splitlines()
        assert process.returncode == 1
        assert "is of another version of the kit: remove it with ./build.py clean --all" in said[-1]

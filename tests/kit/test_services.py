"""Services that run on after us: found by process ID and start time, ended by it, and two clones side by side."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import services
from kit.errors import KitError
from kit.layout import state_dir
from tests.kit.conftest import running

REAL_STATE = state_dir()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KIT_STATE", str(tmp_path / "state"))
    yield tmp_path / "state"
    services.stop_services()


@pytest.mark.unit
class TestDaemon:
    def test_it_is_started_found_and_ended(self, state: Path) -> None:
        daemon = services._Daemon("test")
        daemon.start(["sleep", "60"], {}, lambda: True)
        pid = daemon.pid()
        assert pid is not None
        assert daemon.running()
        assert daemon.stop()
        assert not daemon.running()
        assert not daemon.stop()

    def test_another_process_with_the_same_id_is_never_taken_for_it(self, state: Path) -> None:
        daemon = services._Daemon("test")
        with subprocess.Popen(["sleep", "60"]) as other:
            daemon.file.parent.mkdir(parents=True)
            daemon.file.write_text(json.dumps({"pid": other.pid, "started": "1"}))
            assert not daemon.running()
            assert not daemon.stop()
            assert other.poll() is None
            other.kill()

    def test_one_that_ends_at_once_is_an_error_with_its_last_words(self, state: Path) -> None:
        with pytest.raises(KitError, match="the test ended at once: no room"):
            services._Daemon("test").start(["sh", "-c", "echo no room; exit 1"], {}, lambda: False)

    def test_garbage_in_its_file_counts_as_not_running(self, state: Path) -> None:
        daemon = services._Daemon("test")
        daemon.file.parent.mkdir(parents=True)
        daemon.file.write_text("{")
        assert not daemon.running()


@pytest.mark.unit
class TestPrepare:
    """A machine on which ci/bootstrap.sh, or what stands in for it here, has not run."""

    def bootstrap(self, root: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        (root / "ci").mkdir()
        (root / "ci/bootstrap.sh").write_text(f"#!/bin/sh\n{script}\n")
        (root / "ci/bootstrap.sh").chmod(0o755)
        monkeypatch.setattr(services, "REPO", root)

    def test_what_is_missing_is_one_line(self, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said = "missing here: skopeo: run 'ci/bootstrap.sh --yes' to install it"
        self.bootstrap(tmp_path, monkeypatch, f'echo "error: {said}" >&2; exit 1')
        with pytest.raises(KitError) as caught, services.engine():
            pass
        assert str(caught.value) == said

    def test_it_is_prepared_on_the_way(self, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bootstrap(
            tmp_path,
            monkeypatch,
            f'mkdir -p "$KIT_STATE"; cd "$KIT_STATE"; echo {services.STATE_VERSION} >version; echo host >engine.kind',
        )
        services.check_engine()
        monkeypatch.setattr(services, "REPO", tmp_path / "nowhere")  # once is enough
        services.check_engine()

    def test_our_engine_without_root(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        state.mkdir()
        (state / "engine.kind").write_text("own\n")
        (state / "version").write_text(services.STATE_VERSION)
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        with pytest.raises(KitError, match="runs as root only: run it as root"):
            services.check_engine()


@pytest.mark.unit
def test_the_wanted_port_is_kept_while_it_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert services._free_port(port) != port
    assert services._free_port(port) == port


@pytest.mark.unit
def test_sockets_stay_below_the_kernels_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_STATE", str(tmp_path / ("deep/" * 20)))
    assert len(str(services._run_dir() / "exec/containerd/containerd-debug.sock")) < 108


@pytest.mark.image
@pytest.mark.skipif(not (REAL_STATE / "engine.kind").exists(), reason="ci/bootstrap.sh has not run here")
class TestRealServices:
    @pytest.fixture
    def prepared(self, state: Path) -> Path:
        state.mkdir()
        for tools in ("engine", "runtime"):
            if (REAL_STATE / tools).exists():
                (state / tools).symlink_to(REAL_STATE / tools)
        shutil.copy(REAL_STATE / "engine.kind", state / "engine.kind")
        shutil.copy(REAL_STATE / "version", state / "version")
        return state

    def test_two_clones_have_an_engine_and_a_registry_each(
        self, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = tmp_path / "other"
        shutil.copytree(prepared, other, symlinks=True)
        addresses = []
        for state in (prepared, other):
            monkeypatch.setenv("KIT_STATE", str(state))
            services.start_services()
            status = services.services_status()
            assert all(service["running"] for service in status.values())
            addresses += [service["address"] for service in status.values()]
        assert len(set(addresses)) == 4
        for state in (prepared, other):
            monkeypatch.setenv("KIT_STATE", str(state))
            assert services.stop_services() == ["registry", "Docker engine"]
        assert running(tmp_path) == []
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()

    def test_the_engine_ends_with_the_body_and_writes_only_into_the_state(self, prepared: Path) -> None:
        with services.engine() as docker:
            if not docker.own:
                pytest.skip("this machine's own Docker is used")
            assert services.services_status()["engine"]["running"]
        assert not services.services_status()["engine"]["running"]

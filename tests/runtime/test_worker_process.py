"""A worker's process that several threads launch, replace and stop: a real process under a guard."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import psutil
import pytest

from functional.runtime.errors import RunError
from functional.runtime.fleet.ports import PortRange
from functional.runtime.fleet.process import ManagedProcess
from functional.runtime.fleet.programs import Programs
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.fleet.worker import WorkerProcess
from functional.runtime.recipe.model import Recipe

PATIENCE_S = 30


@pytest.fixture
def worker(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    for name in ("run", "logs"):
        (tmp_path / name).mkdir()
    policy = {"model_name": "tiny", "optimizer": {"lr": 0.1}, "generation": {}}
    settings = FleetSettings(
        namespace="ours",
        recipe=Recipe.model_validate({"policy": policy, "cluster": {"device": "cpu"}}),
        model_dir=tmp_path / "model",
        run_dir=tmp_path / "run",
        log_dir=tmp_path / "logs",
        programs=Programs(program, program, program),
    )
    made = WorkerProcess(settings, 0, ({"PATH": "/bin:/usr/bin"}, {}), PortRange("127.0.0.1"), (), tmp_path / "run")
    yield made
    made.stop()


def test_a_worker_that_was_stopped_is_not_started_again(worker):
    worker.start()
    worker.stop()
    with pytest.raises(RunError, match="worker 0: not started, the fleet is being taken down"):
        worker.restart()
    assert worker.pids() == []


def test_what_a_replacement_under_way_has_started_ends_too(worker, monkeypatch):
    worker.start()
    deadline = time.monotonic() + PATIENCE_S
    while not (first := worker.pids()):
        assert time.monotonic() < deadline
    killing, go_on = threading.Event(), threading.Event()
    kill = ManagedProcess.kill

    def kill_slowly(process):
        killing.set()
        assert go_on.wait(PATIENCE_S)
        kill(process)

    monkeypatch.setattr(ManagedProcess, "kill", kill_slowly)
    with ThreadPoolExecutor() as threads:
        replacing = threads.submit(worker.restart)
        assert killing.wait(PATIENCE_S)
        stopping = threads.submit(worker.stop)
        wait([stopping], 0.5)
        go_on.set()
        assert replacing.result(PATIENCE_S).index == 0
        stopping.result(PATIENCE_S)
    assert worker.problem() is not None
    assert worker.pids() == []
    assert not any(psutil.pid_exists(pid) for pid in first)

"""The doctor on real runs: what is wrong is named. That a healthy run raises no alarm: test_faults.py."""

import json
import shutil
import subprocess
from contextlib import contextmanager, suppress

import psutil
import pytest

from functional.runtime.fleet.guard import descendants
from functional.suite.doctor.examine import RUN, examine
from functional.suite.doctor.folder import RunFolder
from functional.suite.models import find_model
from tests.faults.running import await_event, causes, started

GENERATION = "policy.generation"


def run(out, *overrides):
    """A run to its end; the answer is its exit status."""
    with started(out, *overrides) as process:
        return process.wait(600)


@pytest.mark.faults
@pytest.mark.full
def test_engine_and_trainer_apart_no_signal_and_a_policy_that_stands_still(tmp_path):
    """Bounds below the rounding, a reward that no answer gets, a learning rate of almost 0: they do not meet."""
    out, data = tmp_path / "out", tmp_path / "unanswerable.jsonl"
    rows = ({"prompt": f"{number}+1=", "answer": "no number"} for number in range(16))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bounds = ("checks.token_mult_prob_error=1.0000001", "checks.logprob_noise=1e-9")
    assert run(out, *bounds, f"data.dataset_name={data}", "policy.optimizer.lr=1e-12") == 1
    assert causes(out) >= {"checks-failed", "engine-trainer-apart", "no-signal", "policy-still"}


@pytest.mark.faults
@pytest.mark.full
def test_a_fleet_that_has_too_little_time(tmp_path):
    out = tmp_path / "out"
    assert run(out, f"{GENERATION}.dynamo_cfg.startup_timeout_s=8") == 1
    assert causes(out) == {"startup-timeout"}


@pytest.mark.faults
@pytest.mark.full
def test_a_model_whose_weights_are_damaged(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(find_model("builtin:arithmetic", tmp_path, print), model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    out = tmp_path / "out"
    assert run(out, f"policy.model_name={model}") == 1
    assert "model-files" in causes(out)


@contextmanager
def small_disk(path, size):
    """A file system of its own."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path):
    """Until nothing more can be written there; returns the file that took it all."""
    filler = path / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    assert shutil.disk_usage(path).free < 1 << 16
    return filler


@pytest.mark.faults
@pytest.mark.full
def test_a_disk_that_fills_up_while_the_run_writes_to_it(tmp_path):
    """Somebody else takes what is left of it: the run ends, by itself, with a report that says why."""
    with small_disk(tmp_path / "disk", "64m") as disk:
        out, log = disk / "out", tmp_path / "run.log"
        with started(out, log=log) as process:
            await_event(out, "step 1: generating", process, log)
            everything = descendants(process.pid)
            filler = fill(disk)
            assert process.wait(120) == 1
        assert "No space left on device" in log.read_text()
        report = json.loads((out / "report.json").read_text())
        assert "No space left on device" in report["error"]
        assert "No space left on device" in (out / "report.md").read_text()
        for there in (True, False):
            assert ("disk-full" in causes(out)) is True, f"filler there: {there}"
            assert {one.cause for one in examine(RunFolder.open(out)) if one.symptom == RUN} == {"disk-full"}
            filler.unlink(missing_ok=True)
        assert [pid for pid in everything if psutil.pid_exists(pid)] == []
        assert not RunFolder.open(out).run_dir.exists()
        assert not (out / ".reserve").exists()


@pytest.mark.faults
@pytest.mark.full
def test_a_disk_without_room_for_a_report(tmp_path):
    """Refused before anything is started, in one line."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        log = tmp_path / "run.log"
        with started(disk / "out", log=log) as process:
            assert process.wait(120) == 2
        (line,) = log.read_text().splitlines()
        assert line.startswith(f"error: {disk}/out: no room for the 4 MiB that the report may take")
        assert list((disk / "out").iterdir()) in ([], [disk / "out/logs"])


@pytest.mark.faults
@pytest.mark.full
def test_a_run_that_is_told_to_stop(tmp_path):
    out = tmp_path / "out"
    with started(out) as process:
        await_event(out, "fleet: starting", process)
        process.terminate()
        process.wait(120)
    assert "interrupted" in causes(out)


@pytest.mark.faults
@pytest.mark.full
def test_what_is_left_behind_when_the_guards_are_killed_too(tmp_path):
    """All but the worker's own processes is killed at once: what is still there then is found, and ended here."""
    out = tmp_path / "out"
    with started(out) as process:
        await_event(out, "step 1: generating", process)
        everything = [psutil.Process(pid) for pid in (process.pid, *descendants(process.pid))]
        workers = json.loads((out / "processes.json").read_text())["worker-0"]
        for one in everything:
            if one.pid not in workers:
                one.kill()
        process.wait(30)
        left = [one for one in everything if one.pid in workers and one.is_running()]
        run_dir = RunFolder.open(out).run_dir
        try:
            assert left or run_dir.exists(), "nothing was left behind to be found"
            assert causes(out) >= {"driver-killed", "left-behind"}
        finally:
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            shutil.rmtree(run_dir, ignore_errors=True)
    psutil.wait_procs(left, 10)
    assert "left-behind" not in causes(out)

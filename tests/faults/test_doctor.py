"""The doctor on real runs: what is wrong is named, and a healthy run, running or ended, raises no alarm."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from functional.runtime.fleet.guard import descendants
from functional.runtime.jsonlines import read_json_lines
from functional.suite.doctor.examine import RUN, examine
from functional.suite.doctor.finding import Result
from functional.suite.doctor.folder import RunFolder
from functional.suite.models import find_model
from tests.recipes import RECIPES

RECIPE = RECIPES / "grpo_cpu.yaml"
GENERATION = "policy.generation"
PATIENCE_S = 300.0


def ask(out):
    """As the command line answers."""
    command = [sys.executable, "-m", "functional.suite.cli", "doctor", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


def causes(out, result=Result.PROBLEM):
    return {one.cause for one in examine(RunFolder.open(out)) if one.result is result}


@contextmanager
def started(out, *overrides):
    """A run in a process of its own; ended, with all of it, however this ends."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "functional.suite.cli", "run", str(RECIPE), *overrides, "--out", str(out)]
    with (out / "run.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)


def run(out, *overrides):
    """A run to its end; the answer is its exit status."""
    with started(out, *overrides) as process:
        return process.wait(600)


def await_event(out, name, process):
    deadline = time.monotonic() + PATIENCE_S
    while not (
        (out / "events.jsonl").exists() and name in {row["event"] for row in read_json_lines(out / "events.jsonl")}
    ):
        assert process.poll() is None, (out / "run.log").read_text()[-2000:]
        assert time.monotonic() < deadline, f"«{name}» did not come"
        time.sleep(0.05)


@pytest.mark.faults
def test_a_healthy_run_while_it_runs_and_at_its_end(tmp_path):
    """With a worker stopped in between, which is seen, and seen to be over."""
    out = tmp_path / "out"
    with started(out, "faults.pause_send_version=1", "faults.pause_send_s=12") as process:
        await_event(out, "fleet: starting", process)
        assert ask(out)[0] == 0
        await_event(out, "step 1: generating", process)
        status, answer = ask(out)
        assert (status, answer["state"]) == (0, "running"), answer
        assert any("worker(s) registered; models: " in one["found"] for one in answer["findings"])

        await_event(out, "refit 1: transfer", process)
        (worker, *_) = json.loads((out / "processes.json").read_text())["worker-0"]
        os.kill(worker, signal.SIGSTOP)
        try:
            found = [one for one in examine(RunFolder.open(out)) if one.symptom == RUN]
        finally:
            os.kill(worker, signal.SIGCONT)
        assert [(one.result, one.cause) for one in found] == [(Result.PROBLEM, "process-stopped")]
        assert f"worker-0 ({worker})" in found[0].found
        assert process.wait(300) == 0, (out / "run.log").read_text()[-2000:]
    status, answer = ask(out)
    assert (status, answer["state"]) == (0, "ended"), answer
    assert {one["result"] for one in answer["findings"]} == {"ok"}
    assert all(one["looked_at"] and one["found"] for one in answer["findings"])


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

"""A run in a process of its own, and the doctor on it while it runs and at its end."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

from functional.runtime.jsonlines import read_json_lines
from functional.suite.doctor.examine import RUN, examine
from functional.suite.doctor.finding import Result
from functional.suite.doctor.folder import RunFolder
from tests.recipes import RECIPES

RECIPE = RECIPES / "grpo_cpu.yaml"
HELD = ("faults.pause_send_version=1", "faults.pause_send_s=12")
"""Overrides that keep the transfer of version 1 going for so long that it can be looked at."""
PATIENCE_S = 300.0


@contextmanager
def started(out, *overrides, log=None, **environment):
    """A run in a process of its own; ended, with all of it, however this ends. log: in `out` unless given."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "functional.suite.cli", "run", str(RECIPE), *overrides, "--out", str(out)]
    with (log or out / "run.log").open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)


def await_event(out, name, process, log=None):
    deadline = time.monotonic() + PATIENCE_S
    while not (
        (out / "events.jsonl").exists() and name in {row["event"] for row in read_json_lines(out / "events.jsonl")}
    ):
        assert process.poll() is None, (log or out / "run.log").read_text()[-2000:]
        assert time.monotonic() < deadline, f"«{name}» did not come"
        time.sleep(0.05)


def ask(out):
    """As the command line answers."""
    command = [sys.executable, "-m", "functional.suite.cli", "doctor", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


def causes(out, result=Result.PROBLEM):
    return {one.cause for one in examine(RunFolder.open(out)) if one.result is result}


def look_while_it_runs(out, process):
    """Of a run that is HELD: no alarm in any of its phases; a worker that is stopped is seen, and seen to be over."""
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


def look_at_its_end(out):
    """Of a run that passed: no alarm."""
    status, answer = ask(out)
    assert (status, answer["state"]) == (0, "ended"), answer
    assert {one["result"] for one in answer["findings"]} == {"ok"}
    assert all(one["looked_at"] and one["found"] for one in answer["findings"])

"""Whole runs that generate while they train. Where nothing chats, what is killed is in test_faults."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError

import pytest

from functional.runtime.jsonlines import read_json_lines
from functional.runtime.refit.machine import State, Transition
from functional.runtime.rollout.records import read_records
from functional.runtime.rollout.requests import read_attempts
from functional.suite.async_checks import ServedVersions
from tests.recipes import RECIPES

pytestmark = pytest.mark.faults
DEADLINE_S = 400
AHEAD = ["grpo.async_grpo.enabled=true", "grpo.max_num_steps=4"]
LONG = [
    "policy.model_name=builtin:random-qwen3",
    "data.dataset_name=token_set",
    "policy.optimizer.lr=0.5",
    "policy.generation.max_new_tokens=64",
    "policy.generation.vllm_kwargs.max_num_seqs=8",
]
"""Answers that no stop token ends, few at a time, so that a batch is under way for longer than a step takes."""


def command(out, *overrides):
    words = [sys.executable, "-m", "functional.suite.cli", "run", str(RECIPES / "grpo_cpu.yaml"), *AHEAD, *overrides]
    return [*words, "--out", str(out)]


def run(out, *overrides):
    """Exit status and report."""
    done = subprocess.run(command(out, *overrides), capture_output=True, text=True, timeout=DEADLINE_S)
    assert (out / "report.json").exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, json.loads((out / "report.json").read_text())


def failed(report):
    return [check["name"] for check in report["checks"] if not check["passed"]]


def test_rollouts_and_training_at_once(tmp_path):
    status, report = run(tmp_path)
    assert (status, failed(report)) == (0, [])
    assert {"async.age_bounded", "async.overlap", "async.no_update_in_flight"} <= {c["name"] for c in report["checks"]}
    assert report["asynchronous"]["ages"] == {"0": 64, "1": 192}
    ages = Counter(
        record["step"] - 1 - record["policy_version"] for record in read_records(tmp_path / "rollouts.jsonl")
    )
    assert ages == {0: 64, 1: 192}


@pytest.mark.full
def test_updates_that_do_not_wait_for_rollouts(tmp_path):
    status, report = run(tmp_path, *LONG, IN_FLIGHT)
    assert (status, failed(report)) == (0, [])
    found = report["asynchronous"]
    assert found["spanning"] > 0
    records = read_records(tmp_path / "rollouts.jsonl")
    assert sum(record["policy_version"] < record["last_version"] for record in records) == found["spanning"]
    assert max(record["step"] - 1 - record["policy_version"] for record in records) == 1


IN_FLIGHT = "grpo.async_grpo.in_flight_weight_updates=true"
LIMITED = [
    "policy.generation.dynamo_cfg.max_inflight_requests=3",
    "policy.generation.max_new_tokens=32",
    "grpo.num_prompts_per_step=4",
]
"""One in each of three processes: a batch takes longer than a step."""


def run_script(name, out, *overrides):
    """Of this folder, as `functional.suite.driver`. Exit status, report and records."""
    run_dir = Path(tempfile.mkdtemp(prefix="rl_"))
    words = [sys.executable, str(Path(__file__).with_name(name)), str(RECIPES / "grpo_cpu.yaml"), str(out)]
    out.mkdir(exist_ok=True)
    with (out / "run.log").open("w") as log:
        process = subprocess.Popen([*words, str(run_dir), *AHEAD, *overrides], stdout=log, stderr=log)
        try:
            status = process.wait(2 * DEADLINE_S)
        finally:
            process.terminate()
            process.wait(90)
    assert (out / "report.json").exists(), (out / "run.log").read_text()[-3000:]
    return status, json.loads((out / "report.json").read_text()), read_records(out / "rollouts.jsonl")


@pytest.mark.full
@pytest.mark.parametrize("updates", [(), (IN_FLIGHT,)])
def test_helpers_samples_have_the_versions_that_they_met(tmp_path, updates):
    """Each request passes the gate for itself: an update that begins within a batch is met by those alone that are
    under way, and what is sent after it is of its version."""
    overrides = (*LONG, *LIMITED, "grpo.max_num_steps=3", *updates)
    status, report, records = run_script("spread_run.py", tmp_path, *overrides)
    assert (status, failed(report)) == (0, [])
    by_process = [read_attempts(tmp_path / name) for name in ("requests.jsonl", "requests-1.jsonl", "requests-2.jsonl")]
    shares = [sum(one.purpose == "rollout" for one in attempts) for attempts in by_process]
    assert min(shares) > 0.3 * max(shares), shares
    served = ServedVersions([Transition(**one | {"after": State(one["after"])}) for one in report["refit_transitions"]])
    for record in records:
        first, last = served.at(record["sent_at"]), served.at(record["answered_at"])
        # It passes the gate here and is sent by the helper: an update that does not wait may come between.
        assert record["policy_version"] <= first if updates else record["policy_version"] == first
        # What is answered within an update, after the engines went on, is of the next version.
        assert record["last_version"] in ((last, last + 1) if updates else (first,))
    assert any(r["policy_version"] < r["last_version"] for r in records) == bool(updates)
    met = [{r["policy_version"] for r in records if r["step"] == step} for step in (1, 2, 3)]
    assert max(map(len, met)) > 1, "no update began within a batch"


@pytest.mark.full
def test_updates_that_fail_one_after_the_other_within_one_batch(tmp_path):
    """What is under way is lost with each, and generated again."""
    status, report, records = run_script(
        "failing_updates.py",
        tmp_path,
        *LONG,
        IN_FLIGHT,
        "grpo.async_grpo.max_trajectory_age_steps=2",
        "policy.generation.dynamo_cfg.request_timeout_s=300",
        "grpo.num_prompts_per_step=4",
    )
    assert (status, failed(report)) == (0, [])
    assert [refit["attempts"] for refit in report["refits"]] == [1, 1, 2, 2, 1]
    lost = [one["step"] for one in report["lost_samples"]]
    assert max(Counter(one["rollout"] for one in report["lost_samples"]).values()) == 2
    assert set(lost) == {4}
    assert max(record["attempt"] for record in records if record["step"] == 4) == 3


CHATS = [
    "policy.generation.vllm_cfg.expose_http_server=true",
    "policy.generation.dynamo_cfg.worker_args.endpoint_types=[chat,completions]",
]


@pytest.mark.full
def test_a_worker_lost_in_an_update_that_does_not_wait_while_agents_chat(tmp_path):
    """What is under way is given up, chats too, and every request is accounted for, until the run's end."""
    overrides = [*LONG, *CHATS, IN_FLIGHT, "faults.pause_send_version=2"]
    told, over = Counter(), threading.Event()
    with (tmp_path / "run.log").open("w") as log:
        process = subprocess.Popen(command(tmp_path, *overrides), stdout=log, stderr=log)
        try:
            await_event(process, tmp_path, "step 1: generating")
            agents = [threading.Thread(target=keep_asking, args=(tmp_path, told, over)) for _ in range(3)]
            for agent in agents:
                agent.start()
            await_event(process, tmp_path, "refit 2: transfer")
            time.sleep(2)
            for pid in json.loads((tmp_path / "processes.json").read_text())["worker-0"]:
                os.kill(pid, signal.SIGKILL)
            status = process.wait(2 * DEADLINE_S)
        finally:
            over.set()
            process.terminate()
            process.wait(90)
    for agent in agents:
        agent.join()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (status, failed(report)) == (0, [])
    assert [refit["attempts"] for refit in report["refits"]] == [1, 1, 2, 1, 1]
    assert told[200, ""] > 0
    assert {kind for code, kind in told if code == 503} == {"admission_shut"}
    assert {kind for code, kind in told if code == 502} <= {"fleet_error"}
    assert {code for code, _ in told} <= {200, 502, 503}


def await_event(process, out, name):
    events, deadline = out / "events.jsonl", time.monotonic() + DEADLINE_S
    while not (events.exists() and f'"{name}"' in events.read_text()):
        assert process.poll() is None, (out / "run.log").read_text()[-2000:]
        assert time.monotonic() < deadline, name
        time.sleep(0.05)


def keep_asking(out, told, over):
    """As an agent does, until the server is closed."""
    chat = json.loads((out / "chat.json").read_text())
    asked = {"model": chat["model"], "messages": [{"role": "user", "content": "3+4"}], "max_tokens": 64}
    request = urllib.request.Request(f"{chat['url']}/v1/chat/completions", json.dumps(asked).encode())
    with suppress(OSError):
        while not over.wait(0.1):
            try:
                with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                    told[answer.status, ""] += 1
            except HTTPError as refused:
                told[refused.code, json.loads(refused.read())["error"]["type"]] += 1


REPLACING = "replacing worker 0"


@pytest.mark.full
@pytest.mark.parametrize("delay_s", [0, 6])
def test_a_run_that_is_ended_while_its_rollouts_replace_a_worker(tmp_path, delay_s):
    """At once, and while the new engine starts. Before the first step the trainer has nothing to do, so it is the
    thread of rollouts that finds the loss."""
    with (tmp_path / "run.log").open("w") as log:
        process = subprocess.Popen(command(tmp_path, *LONG), stdout=log, stderr=log)
        try:
            await_event(process, tmp_path, "step 1: generating")
            for pid in json.loads((tmp_path / "processes.json").read_text())["worker-0"]:
                os.kill(pid, signal.SIGKILL)
            await_line(process, tmp_path, REPLACING)
            time.sleep(delay_s)
            process.terminate()
            status = process.wait(DEADLINE_S)
        finally:
            process.kill()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (status, report["error"]) == (1, "stopped by SIGTERM")
    teardown = {check["name"]: check["passed"] for check in report["checks"] if check["name"].startswith("teardown.")}
    assert teardown == {"teardown.nothing_left": True}
    assert not (tmp_path / "logs" / "teardown.log").exists()
    events = [row["event"] for row in read_json_lines(tmp_path / "events.jsonl")]
    assert events[-1].startswith("refit 0 recovering → stopped: ")


def await_line(process, out, words):
    deadline = time.monotonic() + DEADLINE_S
    while words not in (out / "run.log").read_text():
        assert process.poll() is None, (out / "run.log").read_text()[-2000:]
        assert time.monotonic() < deadline, words
        time.sleep(0.05)

"""Whole runs that generate while they train. Where nothing chats, what is killed is in test_faults."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from urllib.error import HTTPError

import pytest

from functional.runtime.rollout.records import read_records
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
    status, report = run(tmp_path, *LONG, "grpo.async_grpo.in_flight_weight_updates=true")
    assert (status, failed(report)) == (0, [])
    found = report["asynchronous"]
    assert found["spanning"] > 0
    records = read_records(tmp_path / "rollouts.jsonl")
    assert sum(record["policy_version"] < record["last_version"] for record in records) == found["spanning"]
    assert max(record["step"] - 1 - record["policy_version"] for record in records) == 1


CHATS = [
    "policy.generation.vllm_cfg.expose_http_server=true",
    "policy.generation.dynamo_cfg.worker_args.endpoint_types=[chat,completions]",
]


@pytest.mark.full
def test_a_worker_lost_in_an_update_that_does_not_wait_while_agents_chat(tmp_path):
    """What is under way is given up, chats too, and every request is accounted for, until the run's end."""
    overrides = [*LONG, *CHATS, "grpo.async_grpo.in_flight_weight_updates=true", "faults.pause_send_version=2"]
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

"""The doctor on folders in which one thing is wrong each."""

import json
import os
import time

import pytest

from functional.runtime.errors import ConfigError
from functional.suite.doctor.causes import REFIT, first
from functional.suite.doctor.examine import _word_of, examine
from functional.suite.doctor.finding import Result
from functional.suite.doctor.folder import RunFolder
from functional.suite.report import write_report
from tests.suite.test_pages import ended


@pytest.fixture
def folder(tmp_path):
    """A run that came to its end, with the files that the doctor reads."""
    write_report(tmp_path, ended(tmp_path))
    start = {"time": time.time() - 60, "event": "run: starting", "run_dir": str(tmp_path / "gone")}
    events = [start, *({"time": time.time(), "event": name} for name in ("fleet: starting", "refit 0: drain"))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "logs").mkdir()
    return tmp_path


def problems(folder):
    return {one.cause for one in examine(RunFolder.open(folder)) if one.result is Result.PROBLEM}


def change(folder, **fields):
    report = json.loads((folder / "report.json").read_text()) | fields
    (folder / "report.json").write_text(json.dumps(report))


def test_nothing_is_wrong(folder):
    assert problems(folder) == set()


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "gpu-memory"),
        ("ValueError: To serve at least one request, (4.38 GiB KV cache is needed, which is larger", "cache-memory"),
        ("RuntimeError: No CUDA GPUs are available", "no-gpu"),
        ("OSError: [Errno 98] Address already in use", "port-taken"),
        ("error: unrecognized arguments: --enable-magic", "engine-option"),
        ("safetensors_rust.SafetensorError: Error while deserializing header", "model-files"),
        ("ModuleNotFoundError: No module named 'vllm'", "missing-module"),
    ],
)  # fmt: skip
def test_why_a_worker_did_not_come_up(folder, log, cause):
    (folder / "logs/worker-0.log").write_text(f"INFO starting\n\x1b[31m{log}\x1b[0m\nINFO end\n")
    events = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("\n".join(events[:2]) + "\n")
    change(folder, status="failed", error="worker 0 exited with status 1; last lines of worker-0.log:\n  | end")
    assert problems(folder) == {"worker-ended", cause}
    (found,) = [one for one in examine(RunFolder.open(folder)) if one.symptom == "Worker exits"]
    assert log[:60] in found.found
    assert found.next_step


def test_a_full_disk_of_a_run_that_failed_and_of_one_that_passed(folder):
    (folder / "logs/nats-server.log").write_text("write failed: No space left on device\n")
    assert problems(folder) == set()
    assert {one.cause for one in examine(RunFolder.open(folder))} == {"", "disk-full"}
    change(folder, status="failed", error="requests cannot be recorded any more: [Errno 28]")
    assert "disk-full" in problems(folder)


def test_environments_that_do_not_fit(folder):
    change(folder, versions={"trainer": {"nvidia-nccl-cu13": "2.28.9"}, "dynamo": {"nvidia-nccl-cu13": "2.30.7"}})
    assert problems(folder) == {"nccl-differs"}
    patch = {"name": "vllm-pause-sleep", "for": "0.23.0", "installed": "0.24.0", "applies": False}
    change(folder, versions={}, release={"build": {"patches": [patch]}})
    assert problems(folder) == {"patch-missing"}


def test_a_run_without_a_report_whose_driver_is_gone(folder):
    (folder / "report.json").unlink()
    (folder / "processes.json").write_text(json.dumps({"driver": [2**22 - 1]}))
    assert problems(folder) == {"driver-killed"}


def test_a_process_id_that_came_again_is_not_taken_for_the_run(folder):
    """These processes are older than the run whose folder names them."""
    began = {"time": time.time(), "event": "run: starting", "run_dir": str(folder / "gone")}
    (folder / "events.jsonl").write_text(json.dumps(began) + "\n")
    (folder / "processes.json").write_text(json.dumps({"etcd": [1, os.getpid()]}))
    assert problems(folder) == set()


def test_no_run_at_all(tmp_path):
    with pytest.raises(ConfigError, match="name the folder of a run"):
        RunFolder.open(tmp_path)
    (tmp_path / "report.json").write_text("{")
    (tmp_path / "events.jsonl").write_text('{"time": 1, "event": "run: starting"}\n{"time": 2, "ev')
    assert problems(tmp_path) == {"driver-killed"}


def test_a_report_of_an_earlier_version_is_read_too(folder):
    report = json.loads((folder / "report.json").read_text())
    for name in ("warnings", "options", "data", "lost_samples"):
        del report[name]
    (folder / "report.json").write_text(json.dumps(report))
    assert problems(folder) == set()


def test_reasons_of_failed_updates_are_told_apart():
    for reason, word in {
        "worker 1: 512 cached tokens on the probe after the clear: the cache was not cleared": "cache-not-cleared",
        "worker 1: flush_cache: injected refusal": "clear-refused",
        "trainer: its process is gone (ActorDiedError)": "sender-lost",
        "worker 0: update_weights (update_by_plan): no answer within the deadline": "transfer-deadline",
        "worker 0: update_by_plan: RemoteDisconnected: Remote end closed connection without response": "worker-lost",
        "Worker failed with error 'weights not proved, 4 problem(s) among 24 tensors": "weights-not-proved",
        "worker 0: the probe fits the other version (0.0013 nats) better than the new one": "old-weights-served",
        "Worker failed with error 'rank 0: injected: the send fails after 3 tensors'": "send-failed",
    }.items():
        cause = first(REFIT, reason)
        assert cause is not None
        assert cause.word == word, reason


def test_a_rank_of_the_trainer_that_ended_outside_of_an_update_is_named():
    assert _word_of("trainer rank 1 of 2: its process is gone") == "trainer-ended"
    in_an_update = "update to policy version 1 stopped, admission shut: trainer rank 1 of 2: its process is gone"
    assert _word_of(in_an_update) == "sender-lost"

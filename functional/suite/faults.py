"""Fault cases: run a recipe for real, kill a part of it at a known moment, and judge the end it comes to."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from functional.runtime.errors import ConfigError, RunError
from functional.runtime.fleet.guard import descendants
from functional.runtime.fleet.sockets import command_line

PATIENCE_S = 400.0
LEFTOVER_DEADLINE_S = 10.0
REPLACEMENT_S = 300.0
"""What a run may take longer when it starts a new worker and goes on to its end."""
RANK_TITLE = "VLLM::Worker"
"""How vLLM names the process of a rank."""
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Case:
    """SIGKILL every process of `target`, or one of its engine's ranks alone, `delay_s` after the run reports `event`;
    `overrides` hold that moment open.

    status: exit status the run must end with; blamed: what its error must say (a killed driver writes no report, and a
    run that replaces the target ends well).
    """

    target: str
    event: str
    blamed: str | None
    status: int = 1
    overrides: tuple[str, ...] = ()
    delay_s: float = 0.2
    rank_only: bool = False


LONG = ("policy.generation.max_new_tokens=64",)
HELD = ("faults.pause_send_version=1",)
AHEAD = ("grpo.async_grpo.enabled=true", "grpo.max_num_steps=4")
RANKS = (
    "policy.generation.vllm_cfg.tensor_parallel_size=2",
    "policy.generation.colocated.resources.gpus_per_node=2",
    "cluster.gpus_per_node=3",
)
TRAINERS = ("cluster.gpus_per_node=3",)
GONE = "trainer rank 1 of 2: its process is gone"
CASES = {
    "worker-killed-generating": Case("worker-0", "step 1: generating", None, 0, LONG, delay_s=0),
    "worker-killed-mid-transfer": Case("worker-0", "refit 1: transfer", None, 0, HELD, delay_s=2),
    "rank-killed-generating": Case("worker-0", "step 1: generating", None, 0, LONG + RANKS, delay_s=0, rank_only=True),
    "rank-killed-mid-transfer": Case("worker-0", "refit 1: transfer", None, 0, HELD + RANKS, delay_s=2, rank_only=True),
    "trainer-rank-killed-generating": Case("trainer-1", "step 1: generating", GONE, overrides=LONG + TRAINERS),
    "trainer-rank-killed-mid-transfer": Case(
        "trainer-1", "refit 1: transfer", GONE, overrides=HELD + TRAINERS, delay_s=2
    ),
    "worker-killed-ahead": Case("worker-0", "step 3: generating", None, 0, LONG + AHEAD, delay_s=0),
    "etcd-killed": Case("etcd", "step 1: generating", "etcd was killed by SIGKILL", overrides=LONG),
    "nats-killed": Case("nats-server", "step 1: generating", "nats-server was killed by SIGKILL", overrides=LONG),
    "frontend-killed": Case("frontend", "step 1: generating", "frontend was killed by SIGKILL", overrides=LONG),
    "driver-killed-starting": Case("driver", "fleet: starting", None, KILLED, delay_s=5),
    "driver-killed-generating": Case("driver", "step 1: generating", None, KILLED, LONG),
    "driver-killed-updating": Case("driver", "refit 1: transfer", None, KILLED, HELD, delay_s=2),
}


@dataclass(frozen=True)
class Outcome:
    """How a case ended. `seconds`: from the kill to the run's exit; `problems` is empty when all is as it should be."""

    case: str
    exit_status: int
    seconds: float
    error: str
    problems: list[str]


def run_case(name: str, recipe: Path, out: Path, overrides: list[str], deadline_s: float) -> Outcome:
    """Run one case into `out`. Raises ConfigError for an unknown name, RunError when the moment never comes."""
    if name not in CASES:
        raise ConfigError(f"fault case {name!r}: known are {', '.join(CASES)}")
    case = CASES[name]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)  # a container's mount stays, empty
    command = [sys.executable, "-m", "functional.suite.cli", "run", str(recipe), *case.overrides, *overrides]
    with (out / "run.log").open("w", encoding="utf-8") as log:
        run = subprocess.Popen([*command, "--out", str(out)], stdout=log, stderr=log)
    try:
        _await_moment(run, case, out)
        time.sleep(case.delay_s)
        everything = descendants(run.pid)
        named: dict[str, list[int]] = json.loads((out / "processes.json").read_text(encoding="utf-8"))
        killed_at = time.monotonic()
        pids = named[case.target]
        for pid in last_rank(pids) if case.rank_only else pids:
            os.kill(pid, signal.SIGKILL)
        status = run.wait(deadline_s + (REPLACEMENT_S if case.status == 0 else 0))
    except subprocess.TimeoutExpired as late:
        raise RunError(f"{name}: the run is still there {deadline_s:g} s after the kill") from late
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(90)
    seconds = time.monotonic() - killed_at
    error, problems = _judge_report(case, out)
    if status != case.status:
        problems.insert(0, f"exit status {status}, expected {case.status}")
    problems += _leftovers(everything, out)
    return Outcome(name, status, seconds, error, problems)


def last_rank(pids: list[int]) -> list[int]:
    """Of an engine's processes, that of the last of its ranks. Raises RunError for an engine of one rank, which has no
    process for it."""
    ranks = [pid for pid in pids if RANK_TITLE in command_line(pid)]
    if len(ranks) < 2:
        raise RunError(f"{len(ranks)} process(es) of ranks among {len(pids)}: the engine has no rank to kill alone")
    return ranks[-1:]


def _judge_report(case: Case, out: Path) -> tuple[str, list[str]]:
    if case.status == KILLED:
        return "", ["a killed driver wrote a report"] if (out / "report.json").exists() else []
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    error = report["error"] or ""
    problems = [] if case.blamed is None or case.blamed in error else [f"the error does not say «{case.blamed}»"]
    if case.status == 0 and not any(refit["replaced"] for refit in report["refits"]):
        problems.append("no worker was replaced")
    wanted = "" if case.status == 0 else "teardown."
    failed = [c for c in report["checks"] if c["name"].startswith(wanted) and not c["passed"]]
    return error, problems + [f"{c['name']}: {c['detail']}" for c in failed]


def _leftovers(pids: list[int], out: Path) -> list[str]:
    """What of the run is still there LEFTOVER_DEADLINE_S after its exit."""
    deadline = time.monotonic() + LEFTOVER_DEADLINE_S
    while (alive := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [f"process {pid} is still there" for pid in alive]
    events = (out / "events.jsonl").read_text(encoding="utf-8").splitlines()
    run_dir = Path(json.loads(events[0])["run_dir"])
    return found + ([f"folder {run_dir} is still there"] if run_dir.exists() else [])


def _await_moment(run: "subprocess.Popen[bytes]", case: Case, out: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    events = out / "events.jsonl"
    while not (events.exists() and f'"{case.event}"' in events.read_text(encoding="utf-8")):
        if run.poll() is not None:
            raise RunError(f"the run ended with status {run.returncode} before «{case.event}»; see {out}/run.log")
        if time.monotonic() > deadline:
            raise RunError(f"«{case.event}» did not come within {PATIENCE_S:g} s; see {out}/run.log")
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def outcome_json(outcome: Outcome) -> str:
    """For programs."""
    return json.dumps(asdict(outcome), indent=2, ensure_ascii=False)

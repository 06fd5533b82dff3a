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

from functional.runtime.errors import ConfigError, RunError


@dataclass(frozen=True)
class Case:
    """Kill every process of `victim` when the run reports `event`; `overrides` hold that moment open."""

    victim: str
    event: str
    blamed: str
    overrides: tuple[str, ...] = ()
    delay_s: float = 0.0


CASES = {
    "worker-killed-generating": Case(
        "worker-0",
        "step 1: generating",
        "worker 0 was killed by SIGKILL",
        ("policy.generation.max_new_tokens=64",),
        0.2,
    ),
    "worker-killed-mid-transfer": Case(
        "worker-0", "refit 1: transfer", "worker 0 was killed by SIGKILL", ("faults.pause_send_version=1",), 2.0
    ),
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
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "functional.suite.cli", "run", str(recipe), *case.overrides, *overrides]
    with (out / "run.log").open("w", encoding="utf-8") as log:
        run = subprocess.Popen([*command, "--out", str(out)], stdout=log, stderr=log)
    try:
        pids = _await_moment(run, case, out)
        time.sleep(case.delay_s)
        killed_at = time.monotonic()
        for pid in pids[case.victim]:
            os.kill(pid, signal.SIGKILL)
        status = run.wait(deadline_s)
    except subprocess.TimeoutExpired as late:
        raise RunError(f"{name}: the run is still there {deadline_s:g} s after the kill") from late
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(90)
    seconds = time.monotonic() - killed_at
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    error = report["error"] or ""
    problems = [] if status == 1 else [f"exit status {status}, expected 1"]
    if case.blamed not in error:
        problems.append(f"the error does not say «{case.blamed}»")
    problems += [
        f"{owner} (pid {pid}) is still there" for owner, owned in pids.items() for pid in owned if _is_alive(pid)
    ]
    problems += [c["detail"] for c in report["checks"] if c["name"].startswith("teardown.") and not c["passed"]]
    return Outcome(name, status, seconds, error, problems)


def _await_moment(
    run: "subprocess.Popen[bytes]", case: Case, out: Path, patience_s: float = 400
) -> dict[str, list[int]]:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if run.poll() is not None:
            raise RunError(f"the run ended with status {run.returncode} before «{case.event}»; see {out}/run.log")
        if _has_event(out / "events.jsonl", case.event):
            pids: dict[str, Any] = json.loads((out / "processes.json").read_text(encoding="utf-8"))
            return pids
        time.sleep(0.02)
    raise RunError(f"«{case.event}» did not come within {patience_s:g} s; see {out}/run.log")


def _has_event(path: Path, event: str) -> bool:
    return path.exists() and f'"{event}"' in path.read_text(encoding="utf-8")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def outcome_json(outcome: Outcome) -> str:
    """For programs."""
    return json.dumps(asdict(outcome), indent=2, ensure_ascii=False)

"""What an update of the fleet takes, phase by phase, beside what others take for the same bytes in the same run.

In turns, with no request in flight: an update as `FleetRefit` makes it; vLLM's own checkpoint protocol over the same
transport, which proves nothing; and a broadcast of as many bytes from and to a buffer. Each update is of other weights.
Written to OUT/refit-rates.json; `python -m bench.refit --add` makes tables of it.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from functional.runtime.fleet.worker import Worker
from functional.runtime.refit.machine import Event, State
from functional.runtime.refit.parts import RefitResult
from functional.suite import driver
from functional.suite.report import write_atomically
from functional.suite.session import Parts, Session, interrupt
from functional.suite.watching import watched

REPEATS = 20
RESULT = "refit-rates.json"
KIT, PROTOCOL, BROADCAST = "update", "vLLM's checkpoint protocol, no proof", "broadcast of the same bytes"


class RatesSession(Session):
    """A run that measures updates instead of training. A first round of each is not counted."""

    def _train(self, parts: Parts) -> None:
        self._refit(parts, 0)
        self._beside = ThreadPoolExecutor(len(parts.fleet.workers) + 1)
        rows: dict[str, list[dict[str, float]]] = {KIT: [], PROTOCOL: [], BROADCAST: []}
        memory = []
        for version in range(1, REPEATS + 2):
            rows[KIT].append(self._update(parts, version))
            memory.append(used_mib())
            rows[PROTOCOL].append(self._protocol(parts, version))
            rows[BROADCAST].append(self._broadcast(parts, version))
        counted = {way: taken[1:] for way, taken in rows.items()}
        self._write(parts, counted, memory)
        for way, taken in counted.items():
            self.say(f"{way}: {statistics.median(row['total'] for row in taken):.3f} s")

    def _update(self, parts: Parts, version: int) -> dict[str, float]:
        """Seconds of each phase of an update to new weights, and of what belongs to a step around it."""
        kept = parts.trainer.keep.remote()
        watched(parts.fleet, kept)
        figures = watched(parts.fleet, parts.trainer.nudge.remote(version))
        began = time.monotonic()
        refused = parts.refit.stale_is_refused(version)
        stale_s = time.monotonic() - began
        self.checks.add(f"rates.stale{version}", bool(refused), refused[:100])
        result = self._refit(parts, version, f"rates{version}")
        return {**result.phases, **figures, "stale control": stale_s, "shut": shut_s(result), "total": result.total_s}

    def _protocol(self, parts: Parts, version: int) -> dict[str, float]:
        """Pause, start, transfer, finish, resume, as vLLM and Dynamo offer it."""
        taken: dict[str, float] = {}
        began = time.monotonic()
        with phase(taken, "pause"):
            # In this mode the pause is as vLLM ships it.
            self._on_all(parts, lambda w: w.control.call("pause_generation", {"mode": "keep", "clear_cache": True}))
        with phase(taken, "start"):
            self._on_all(
                parts, lambda w: w.control.engine_rpc("start_weight_update", str(version), is_checkpoint_format=True)
            )
        with phase(taken, "transfer"):
            self._send(parts, version, "send", "update_weights")
        with phase(taken, "finish"):
            self._on_all(parts, lambda w: w.control.engine_rpc("finish_weight_update", str(version)))
        with phase(taken, "resume"):
            self._on_all(parts, lambda w: w.control.call("resume_generation"))
        return {**taken, "total": time.monotonic() - began}

    def _broadcast(self, parts: Parts, version: int) -> dict[str, float]:
        began = time.monotonic()
        self._send(parts, version, "exchange", "exchange_bytes", allow_unpaused=True)
        return {"total": time.monotonic() - began}

    def _send(self, parts: Parts, version: int, trainers: str, engines: str, **options: Any) -> None:
        """The trainer's part beside the workers'."""
        info = watched(parts.fleet, parts.trainer.weights.remote("metadata", version)).info()
        sent = parts.trainer.weights.remote(trainers, version)
        self._on_all(parts, lambda w: w.control.engine_rpc(engines, str(version), update_info=info, **options))
        watched(parts.fleet, sent)

    def _on_all(self, parts: Parts, action: Callable[[Worker], Any]) -> None:
        for future in [self._beside.submit(action, worker) for worker in parts.fleet.workers]:
            future.result()

    def _write(self, parts: Parts, rows: dict[str, list[dict[str, float]]], memory: list[list[int]]) -> None:
        refit, recipe = self.report.refits[-1], self.recipe
        about = {
            "model": recipe.policy.model_name,
            "parameters": self.report.parameters,
            "bytes": refit.bytes_sent,
            "tensors": refit.tensors,
            "device": device_name(recipe.cluster.device),
            "shared": recipe.cluster.share_gpu,
            "workers": len(parts.fleet.workers),
            "processors": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[1],
            "proof": recipe.proof,
            "by_plan": refit.by_plan,
            "probe_requests": 1,
            "memory_mib": memory,
            "enforce_eager": recipe.policy.generation.vllm_cfg.enforce_eager,
            "versions": self.report.versions["dynamo"],
        }
        write_atomically(self.out / RESULT, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


@contextmanager
def phase(taken: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    taken[name] = time.monotonic() - began


def shut_s(result: RefitResult) -> float:
    """Seconds from the shutting of admission to its opening."""
    shut = next(t.time for t in result.transitions if t.event is Event.BEGIN)
    opened = next(t.time for t in reversed(result.transitions) if t.after is State.SERVING)
    return opened - shut


def used_mib() -> list[int]:
    """Memory in use of each GPU, in MiB; none where there is no GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in asked.stdout.split()]


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def main(arguments: list[str]) -> int:
    """Measure: RECIPE OUT RUN_DIR [key=value …]; 0 when every update came to its end."""
    recipe, out, run_dir, *overrides = arguments
    return driver.run(Path(recipe), Path(out), Path(run_dir), overrides, RatesSession)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main(sys.argv[1:]))

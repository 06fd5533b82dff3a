"""The driver's processor time for an update of many workers: `python -m bench.refit_scale_inside OUT` in the image.

The real FleetRefit, WorkerControl and RolloutClient against `bench.control_servers`, a process of its own, with the
manifest of a Qwen3-8B, updated by plan; the trainer answers at once. Processor time is user and system time of this
process, all threads.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from functional.engine.plan_wire import Verdict
from functional.engine.proof import EngineProof
from functional.engine.wire import Manifest, Slot
from functional.runtime.fleet.control import WorkerControl
from functional.runtime.fleet.http_server import HttpServer
from functional.runtime.fleet.worker import Worker
from functional.runtime.refit.probe import TOKENS, ProbeScore, probe_prompt
from functional.runtime.refit.transaction import FleetRefit
from functional.runtime.rollout.client import Limits, RolloutClient
from functional.runtime.rollout.completion import Completion, Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool

WORKERS = (1, 8, 64, 256)
REPEATS = 10
PROBED = 24
"""Workers' probes that are counted in all, beyond which one update is."""
TIMEOUT_S = 60.0
PROMPT_TOKENS = TOKENS + 1


def names_of_8b() -> list[str]:
    """Checkpoint names of a Qwen3 with 36 layers."""
    attention = [f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    rest = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    rest += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    layers = [f"model.layers.{layer}.{name}" for layer in range(36) for name in (*attention, *rest)]
    return ["model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"]


class AnsweringSource:
    """A trainer that has nothing to do."""

    def __init__(self) -> None:
        slots = tuple(Slot(name, torch.bfloat16, (4096, 4096)) for name in names_of_8b())
        self._manifest = Manifest(slots, packed=True)

    def metadata(self, version: int) -> Manifest:
        return self._manifest

    def listen(self, address: str) -> int:
        return 1

    def connect(self, address: str, port: int, world_size: int) -> None:
        pass

    def agree(self, version: int) -> dict[str, str]:
        return {}

    def send_by_plan(self, version: int) -> Verdict:
        return Verdict([], len(self._manifest.slots), [self._manifest.nbytes], 0.0, 0.0)

    def prove_by_plan(self, version: int) -> Verdict:
        raise NotImplementedError

    def send(self, version: int) -> None:
        raise NotImplementedError

    def proof(self, version: int) -> EngineProof:
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        pass

    def score(self, version: int, prompt: Sequence[int]) -> ProbeScore:
        return ProbeScore([-1.0] * (len(prompt) - 1), [-2.0] * (len(prompt) - 1))


@contextmanager
def simulated(count: int) -> Iterator[tuple[str, list[Worker]]]:
    """The frontend's URL, and the workers."""
    command = [sys.executable, "-m", "bench.control_servers", str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        frontend, *ports = json.loads(process.stdout.readline())
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        controls = [WorkerControl(index, HttpServer(url), TIMEOUT_S) for index, url in enumerate(urls)]
        yield f"http://127.0.0.1:{frontend}", [Worker(index, index, control) for index, control in enumerate(controls)]
        process.stdin.close()


def measure(count: int) -> dict[str, float]:
    """Median seconds of processor time and wall time of an update, with the probe and with one that costs nothing."""
    with simulated(count) as (url, workers), HttpPool() as pool:
        gate = AdmissionGate()
        client = RolloutClient(pool, url, "policy", gate, Limits(151936, 40960, token_bytes=256), TIMEOUT_S)
        sampling = Sampling(1, ignore_eos=True, prompt_logprobs=True)

        def probe(worker: Worker, round_number: int) -> Completion:
            prompt = probe_prompt(round_number, 151936, PROMPT_TOKENS)
            return pool.run(client.complete_on(worker.instance_id, [prompt], sampling))[0]

        free = replace(probe(workers[0], 0), cached_tokens=0)
        asked: set[int] = set()

        def free_probe(worker: Worker, round_number: int) -> Completion:
            """A hit the first time, which is before the clear."""
            is_warm = worker.index not in asked
            asked.symmetric_difference_update({worker.index})
            return replace(free, cached_tokens=32 if is_warm else 0)

        row: dict[str, float] = {"workers": count}
        for name, used, repeats in (
            ("control", free_probe, REPEATS),
            ("all", probe, min(REPEATS, max(1, PROBED // count))),
        ):
            refit = FleetRefit(workers, AnsweringSource(), gate, used, address="127.0.0.1", timeout_s=TIMEOUT_S)
            refit.update(0)
            times = [timed(refit, version) for version in range(1, repeats + 1)]
            row[f"{name}_updates"] = repeats
            row[f"{name}_cpu_s"] = statistics.median(cpu for cpu, _ in times)
            row[f"{name}_wall_s"] = statistics.median(wall for _, wall in times)
        return row


def timed(refit: FleetRefit, version: int) -> tuple[float, float]:
    """Seconds of processor time and of wall time."""
    cpu, wall = time.process_time(), time.monotonic()
    refit.update(version)
    return time.process_time() - cpu, time.monotonic() - wall


def main(out: Path) -> None:
    rows = []
    for count in WORKERS:
        rows.append(measure(count))
        print({name: round(value, 5) for name, value in rows[-1].items()}, flush=True)
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

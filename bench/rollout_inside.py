"""What bench.rollout measures, inside the image.

    python -m bench.rollout_inside PART ROUNDS OUT

writes OUT/PART.json. PART: instant, memory or real.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.instant_server import MODEL, VOCAB_SIZE
from bench.rollout_clients import Measured, Target, compare
from functional.suite.cli import run_module

PROMPT_TOKENS = 512
CELLS = ((64, 64, 2048), (64, 1024, 4096), (1024, 64, 1024), (1024, 1024, 2048))
"""Tokens, requests in flight, requests."""
MEMORY = ((64, 1000), (64, 10_000), (1024, 1000), (1024, 10_000))
RECIPE, CONTEXT = Path("functional/recipes/grpo_cpu.yaml"), "policy.generation.vllm_cfg.max_model_len=2048"


def main(part: str, rounds: str, out: str) -> int:
    result = Path(out) / f"{part}.json"
    if part == "real":
        return run_module("bench.rollout_real", RECIPE, Path(out), rounds, CONTEXT)
    found = in_memory() if part == "memory" else [asdict(one) for one in at_once(int(rounds))]
    result.write_text(json.dumps(found))
    return 0


def at_once(rounds: int) -> list[Measured]:
    with instant_server(0) as target:
        return [
            one
            for tokens, inflight, requests in CELLS
            for one in compare(target, tokens, inflight, requests, PROMPT_TOKENS, rounds)
        ]


def in_memory() -> list[dict[str, Any]]:
    """Each size in a process of its own, against a server that answers when all requests are there."""
    found = []
    for tokens, inflight in MEMORY:
        with instant_server(inflight) as target:
            words = [target.url, str(tokens), str(inflight), str(PROMPT_TOKENS)]
            done = subprocess.run(
                [sys.executable, "-m", "bench.rollout_memory", *words], check=True, stdout=subprocess.PIPE
            )
        found.append(json.loads(done.stdout))
    return found


@contextlib.contextmanager
def instant_server(hold: int) -> Iterator[Target]:
    command = [sys.executable, "-m", "bench.instant_server", str(hold)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield Target(server.stdout.readline().strip(), MODEL, VOCAB_SIZE, max_model_len=1 << 20)
        finally:
            server.kill()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

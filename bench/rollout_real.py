"""Both clients against a real frontend and a worker on CPU: RECIPE OUT RUN_DIR ROUNDS [key=value …].

First it holds the instant server's answers against a real one: they must have the same keys.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.instant_server import answer
from bench.rollout_clients import Target, make_prompts
from functional.runtime.errors import RunError
from functional.runtime.rollout.completion import Sampling, request_body
from functional.suite import driver
from functional.suite.session import Parts, Session, interrupt

CELLS = ((64, 64, 128), (1024, 16, 16))
"""Tokens, requests in flight, requests."""
PROMPT_TOKENS = 512


class BenchSession(Session):
    """A run that measures clients instead of training."""

    rounds = 0

    def _train(self, parts: Parts) -> None:
        self._refit(parts, 0)
        limits = parts.client.limits
        served = self.recipe.policy.model_name
        target = Target(parts.fleet.frontend.url, served, limits.vocab_size, limits.max_model_len)
        check_shape(target)
        measured = []
        for tokens, inflight, requests in CELLS:
            measured += apart(target, tokens, inflight, requests, PROMPT_TOKENS, self.rounds)
            self.say(f"{tokens} tokens measured")
        (self.out / "real.json").write_text(json.dumps(measured))


def apart(target: Target, *numbers: int) -> list[dict[str, Any]]:
    """What `compare` measures, in a process that has no other work, as this one has with Ray and the telemetry."""
    words = [target.url, target.model, str(target.vocab_size), str(target.max_model_len), *map(str, numbers)]
    command = [sys.executable, "-m", "bench.rollout_clients", *words]
    found: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def check_shape(target: Target) -> None:
    """Raise RunError unless the instant server's answers have the keys of this frontend's."""
    (prompt,) = make_prompts(1, PROMPT_TOKENS, target.vocab_size)
    body = request_body(target.model, prompt, Sampling(2, ignore_eos=True), None)
    headers = {"x-dynamo-request-id": str(uuid.uuid4())}
    response = httpx.post(f"{target.url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60)
    real, ours = set(keys(response.json())), set(keys(answer(2)))
    if real != ours:
        raise RunError(f"the instant server's answers are not shaped as the frontend's: {sorted(real ^ ours)}")


def keys(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{where}.{name}"
            yield from keys(inner, f"{where}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, f"{where}[]")


def main(recipe: str, out: str, run_dir: str, rounds: str, *overrides: str) -> int:
    BenchSession.rounds = int(rounds)
    return driver.run(Path(recipe), Path(out), Path(run_dir), list(overrides), BenchSession)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main(*sys.argv[1:]))

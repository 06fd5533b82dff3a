"""The two clients that bench.rollout compares, and one measurement of each: processor time a request.

    python -m bench.rollout_clients URL MODEL VOCAB_SIZE MAX_MODEL_LEN TOKENS IN_FLIGHT REQUESTS PROMPT_TOKENS ROUNDS

prints JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from functional.runtime.rollout.client import Limits, RolloutClient
from functional.runtime.rollout.completion import Completion, Sampling, request_body
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.records import RecordWriter, RolloutRecord
from functional.runtime.rollout.requests import RequestJournal

TIMEOUT_S = 600.0
GENERATIONS = 8


@dataclass(frozen=True)
class Target:
    """A server, and what may be asked of it."""

    url: str
    model: str
    vocab_size: int
    max_model_len: int


class OurClient:
    """The runtime's, with its validation, its journal of requests and a record of each rollout."""

    def __init__(self, target: Target, inflight: int | None, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        journal = RequestJournal(folder / "requests.jsonl")
        self._stack.callback(journal.close)
        self._records = self._stack.enter_context(RecordWriter(folder / "rollouts.jsonl"))
        self._pool = self._stack.enter_context(HttpPool())
        limits = Limits(target.vocab_size, target.max_model_len, token_bytes=256)
        self._client = RolloutClient(
            self._pool, target.url, target.model, AdmissionGate(), limits, TIMEOUT_S, journal, inflight
        )

    def complete(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Completion]:
        sampling = Sampling(tokens, ignore_eos=True)
        completions = self._pool.run(self._client.complete_all(prompts, sampling))
        if problems := {completion.problem for completion in completions if completion.problem}:
            raise SystemExit(f"error: the server's answers break rules: {problems}")
        self._records.write([as_record(index, one) for index, one in enumerate(completions)])
        return completions

    def close(self) -> None:
        self._stack.close()


class MinimalClient:
    """aiohttp and orjson, and nothing else: no check, no record, no second attempt."""

    def __init__(self, target: Target, inflight: int, folder: Path) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._limit = asyncio.Semaphore(inflight)
        self._http = self._loop.run_until_complete(self._open())

    async def _open(self) -> Any:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    def complete(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[tuple[list[int], list[float]]]:
        return self._loop.run_until_complete(self._all(prompts, tokens))

    async def _all(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[tuple[list[int], list[float]]]:
        return await asyncio.gather(*(self._one(prompt, tokens) for prompt in prompts))

    async def _one(self, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], list[float]]:
        async with self._limit:
            body = request_body(self._target.model, prompt, Sampling(tokens, ignore_eos=True), None)
            headers = {"x-dynamo-request-id": str(uuid.uuid4()), "content-type": "application/json"}
            url = f"{self._target.url}/v1/completions"
            async with self._http.post(url, data=orjson.dumps(body), headers=headers) as response:
                response.raise_for_status()
                engine = orjson.loads(await response.read())["nvext"]["engine_data"]
                return engine["completion_token_ids"], engine["completion_logprobs"]

    def close(self) -> None:
        self._loop.run_until_complete(self._http.close())
        self._loop.close()


Client = OurClient | MinimalClient
CLIENTS: dict[str, type[OurClient] | type[MinimalClient]] = {"ours": OurClient, "minimal": MinimalClient}


@dataclass(frozen=True)
class Measured:
    """One client's batch. Seconds; processor_s: of this process, user and system, all threads."""

    client: str
    requests: int
    tokens: int
    inflight: int
    processor_s: float
    wall_s: float


def compare(
    target: Target, tokens: int, inflight: int, requests: int, prompt_tokens: int, rounds: int
) -> list[Measured]:
    """Both clients in turns, their connections open before."""
    prompts = make_prompts(requests, prompt_tokens, target.vocab_size)
    found = []
    with opened(target, inflight) as clients:
        for client in clients.values():
            client.complete(prompts[:inflight], tokens)
        for turn in range(rounds):
            for name in sorted(clients, reverse=bool(turn % 2)):
                found.append(measure(name, clients[name], prompts, tokens, inflight))
    return found


@contextlib.contextmanager
def opened(target: Target, inflight: int) -> Iterator[dict[str, Client]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        clients: dict[str, Client] = {}
        for name, kind in CLIENTS.items():
            clients[name] = kind(target, inflight, Path(folder))
            stack.callback(clients[name].close)
        yield clients


def measure(name: str, client: Client, prompts: Sequence[tuple[int, ...]], tokens: int, inflight: int) -> Measured:
    began, used = time.monotonic(), processor_s()
    client.complete(prompts, tokens)
    return Measured(name, len(prompts), tokens, inflight, processor_s() - used, time.monotonic() - began)


def processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def make_prompts(number: int, tokens: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Random prompts, GENERATIONS of each."""
    rng = random.Random(number)
    groups = [tuple(rng.randrange(vocab_size) for _ in range(tokens)) for _ in range(-(-number // GENERATIONS))]
    return [prompt for prompt in groups for _ in range(GENERATIONS)][:number]


def as_record(index: int, completion: Completion) -> RolloutRecord:
    return RolloutRecord.of(
        completion, run="bench", step=1, group=index // GENERATIONS, rollout=index, reward=1.0, advantage=0.0
    )


def main(url: str, model: str, *numbers: str) -> None:
    vocab_size, max_model_len, *rest = map(int, numbers)
    measured = compare(Target(url, model, vocab_size, max_model_len), *rest)
    print(json.dumps([asdict(one) for one in measured]))


if __name__ == "__main__":
    main(*sys.argv[1:])

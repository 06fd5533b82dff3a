"""What bench.chat measures, inside the image.

    python -m bench.chat_inside chat ROUNDS OUT

writes OUT/chat.json.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from bench.instant_server import MODEL, VOCAB_SIZE
from bench.rollout_clients import TIMEOUT_S, processor_s
from bench.rollout_inside import instant_server
from functional.runtime.chat.client import ChatClient, ChatPolicy
from functional.runtime.chat.request import read_request
from functional.runtime.chat.server import ChatServer
from functional.runtime.chat.template import ChatTemplate
from functional.runtime.rollout.client import Limits
from functional.runtime.rollout.completion import Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.requests import RequestJournal
from functional.runtime.rollout.spread import Served
from functional.suite.tool_questions import TOOLS
from functional.suite.vocabulary import TOOL_TEMPLATE, TURN_END, wide_tokenizer

CELLS = ((64, 0, 64), (64, 3, 64), (64, 3, 256), (512, 3, 64))
"""Tokens of an answer, turns before, turns in flight."""
SAID = 96
"""Words of a user's message."""
TURNS = 512
"""Measured at a time."""


@dataclass(frozen=True)
class Measured:
    """One path's turns. prompt: its tokens; processor_s: seconds of this process, user and system, all threads."""

    path: str
    prompt: int
    tokens: int
    before: int
    inflight: int
    turns: int
    processor_s: float


def main(part: str, rounds: str, out: str) -> int:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wide_tokenizer(VOCAB_SIZE), eos_token=TURN_END)
    template = ChatTemplate(tokenizer, frozenset({tokenizer.eos_token_id}), TOOL_TEMPLATE)
    found = []
    with instant_server(0) as target, tempfile.TemporaryDirectory() as folder:
        served = Served(target.url, MODEL, Limits(VOCAB_SIZE, target.max_model_len, 256), TIMEOUT_S)
        for tokens, before, inflight in CELLS:
            bodies = [conversation(template, tokenizer, tokens, before, number) for number in range(64)]
            found += list(compare(served, template, bodies, tokens, before, inflight, int(rounds), Path(folder)))
    (Path(out) / f"{part}.json").write_text(json.dumps([asdict(one) for one in found]))
    return 0


def conversation(template: ChatTemplate, tokenizer: Any, tokens: int, before: int, number: int) -> bytes:
    """A turn's request with `before` turns before it, each with the token IDs that its answer carried."""
    rng = random.Random(number)
    messages: list[dict[str, Any]] = []
    for turn in range(before + 1):
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 4))) for _ in range(SAID)]
        messages.append({"role": "user", "content": " ".join(words)})
        if turn < before:
            prompt = template.prompt(read_request(msgspec.json.encode({"messages": messages, "tools": TOOLS}), 1.0))
            ids = [rng.randrange(200, 100_000) for _ in range(tokens)]
            known = {"prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": [-0.5] * tokens}
            messages.append({"role": "assistant", "content": tokenizer.decode(ids), **known})
    body: bytes = msgspec.json.encode({"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": tokens})
    return body


def compare(
    served: Served,
    template: ChatTemplate,
    bodies: list[bytes],
    tokens: int,
    before: int,
    inflight: int,
    rounds: int,
    folder: Path,
) -> Iterator[Measured]:
    """Both paths in turns, on one pool, with a journal each."""
    prompts = [template.prompt(read_request(body, 1.0)) for body in bodies]
    chosen = [index % len(bodies) for index in range(TURNS)]
    file = folder / "bodies.json"
    file.write_bytes(msgspec.json.encode([body.decode() for body in bodies]))
    with (
        contextlib.closing(RequestJournal(folder / "chat.jsonl")) as chat_journal,
        contextlib.closing(RequestJournal(folder / "direct.jsonl")) as direct_journal,
        HttpPool() as pool,
    ):
        gate = AdmissionGate()
        client = ChatClient(pool, gate, served, ChatPolicy(template, Sampling(tokens)), chat_journal)
        server = ChatServer(client, gate, "127.0.0.1")
        server.start()
        capped = Served(served.url, served.model, served.limits, served.timeout_s, inflight)
        direct = capped.client(pool, gate, direct_journal)

        def measured(path: str) -> Measured:
            agents = Agents(server.url, file, inflight) if path == "chat" else None
            began = processor_s()
            if agents is not None:
                agents.ask()
            else:
                sampling = Sampling(tokens, ignore_eos=True)
                completions = pool.run(direct.complete_all([prompts[index] for index in chosen], sampling))
                if problems := {one.problem for one in completions if one.problem}:
                    raise SystemExit(f"error: the server's answers break rules: {problems}")
            used = processor_s() - began
            return Measured(path, len(prompts[0]), tokens, before, inflight, TURNS, used)

        for path in ("chat", "direct"):
            measured(path)
        for turn in range(rounds):
            for path in ("chat", "direct") if turn % 2 else ("direct", "chat"):
                yield measured(path)
        server.close()


class Agents:
    """A process that asks for TURNS turns, so many in flight, once it is told to."""

    def __init__(self, url: str, bodies: Path, inflight: int) -> None:
        command = [sys.executable, "-m", "bench.chat_agents", url, str(bodies), str(inflight), str(TURNS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hear("ready")

    def ask(self) -> None:
        """Returns once all are answered."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._hear("done")
        self._process.wait()

    def _hear(self, word: str) -> None:
        assert self._process.stdout is not None
        heard = self._process.stdout.readline().strip()
        if heard != word:
            raise SystemExit(f"error: the agents say «{heard}», not «{word}»")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

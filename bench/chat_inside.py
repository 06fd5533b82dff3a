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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from bench.instant_server import MODEL, VOCAB_SIZE
from bench.rollout_clients import GENERATIONS, TIMEOUT_S, processor_s
from bench.rollout_inside import instant_server
from functional.runtime.chat.client import ChatClient, ChatPolicy
from functional.runtime.chat.request import read_request
from functional.runtime.chat.server import ChatServer
from functional.runtime.chat.template import ChatTemplate
from functional.runtime.rollout.client import Limits
from functional.runtime.rollout.completion import Completion, Sampling
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
"""Measured at a time; each of another conversation."""


@dataclass(frozen=True)
class Turn:
    """One turn on both paths. body: the chat request; known: token IDs up to the turn before; text: what is new."""

    body: bytes
    known: tuple[int, ...]
    text: str


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
            turns = [make_turn(template, tokenizer, tokens, before, number) for number in range(TURNS)]
            paths = Paths(served, template, tokenizer, turns, tokens, inflight, Path(folder))
            found += [asdict(one) for one in paths.compare(int(rounds), before)]
            paths.close()
    (Path(out) / f"{part}.json").write_text(json.dumps(found))
    return 0


def make_turn(template: ChatTemplate, tokenizer: Any, tokens: int, before: int, number: int) -> Turn:
    """With `before` turns before it, each with the token IDs that its answer carried. GENERATIONS conversations begin
    with one question, as a group of rollouts does; then they differ."""
    rng = random.Random(number)
    messages: list[dict[str, Any]] = []
    known: tuple[int, ...] = ()
    for turn in range(before + 1):
        messages.append({"role": "user", "content": say(rng if turn else random.Random(number // GENERATIONS))})
        request = read_request(msgspec.json.encode({"messages": messages, "tools": TOOLS}), 1.0)
        prompt = template.prompt(request)
        if turn < before:
            ids = [rng.randrange(200, 100_000) for _ in range(tokens)]
            carried = {"prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": [-0.5] * tokens}
            messages.append({"role": "assistant", "content": tokenizer.decode(ids), **carried})
            known = (*prompt, *ids)
    body = msgspec.json.encode({"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": tokens})
    return Turn(body, known, tokenizer.decode(prompt[len(known) :]))


def say(rng: random.Random) -> str:
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 4))) for _ in range(SAID))


class Paths:
    """Both, on one pool, with a journal each; from text to text.

    Direct: what is new is encoded (a group's first question once), completed by token IDs, the answer decoded. Chat:
    the same by HTTP. `client` is the direct path without encoding and decoding.
    """

    def __init__(
        self,
        served: Served,
        template: ChatTemplate,
        tokenizer: Any,
        turns: list[Turn],
        tokens: int,
        inflight: int,
        folder: Path,
    ) -> None:
        self._tokenizer, self._turns, self._tokens, self._inflight = tokenizer, turns, tokens, inflight
        self._prompts = [self._prompt(turn) for turn in turns]
        self._bodies = folder / "bodies.json"
        self._bodies.write_bytes(msgspec.json.encode([turn.body.decode() for turn in turns]))
        self._stack = contextlib.ExitStack()
        journals = [RequestJournal(folder / f"{path}.jsonl") for path in ("chat", "direct")]
        for journal in journals:
            self._stack.callback(journal.close)
        self._pool = self._stack.enter_context(HttpPool())
        gate = AdmissionGate()
        client = ChatClient(self._pool, gate, served, ChatPolicy(template, Sampling(tokens)), journals[0])
        self._server = ChatServer(client, gate, "127.0.0.1")
        self._server.start()
        self._stack.callback(self._server.close)
        capped = replace(served, max_inflight=inflight)
        self._direct = capped.client(self._pool, gate, journals[1])

    def close(self) -> None:
        self._stack.close()

    def compare(self, rounds: int, before: int) -> Iterator[Measured]:
        """In turns, after one round that is not counted."""
        ways: dict[str, Callable[[], float]] = {
            "chat": lambda: timed(Agents(self._server.url, self._bodies, self._inflight).ask),
            "direct": lambda: timed(self._text),
            "client": lambda: timed(lambda: self._complete(self._prompts)),
        }
        names = list(ways)
        for number in range(-1, rounds):
            for name in names[number % 3 :] + names[: number % 3]:
                used = ways[name]()
                if number >= 0:
                    yield Measured(
                        name, len(self._prompts[0]), self._tokens, before, self._inflight, len(self._turns), used
                    )

    def _text(self) -> None:
        groups: dict[str, list[int]] = {}
        prompts = []
        for turn in self._turns:
            if turn.known:
                prompts.append(self._prompt(turn))
                continue
            if turn.text not in groups:
                groups[turn.text] = self._tokenizer.encode(turn.text, add_special_tokens=False)
            prompts.append(tuple(groups[turn.text]))
        for completion in self._complete(prompts):
            self._tokenizer.decode(completion.token_ids)

    def _complete(self, prompts: list[tuple[int, ...]]) -> list[Completion]:
        sampling = Sampling(self._tokens, ignore_eos=True)
        completions = self._pool.run(self._direct.complete_all(prompts, sampling))
        if problems := {one.problem for one in completions if one.problem}:
            raise SystemExit(f"error: the server's answers break rules: {problems}")
        return completions

    def _prompt(self, turn: Turn) -> tuple[int, ...]:
        return (*turn.known, *self._tokenizer.encode(turn.text, add_special_tokens=False))


def timed(work: Callable[[], object]) -> float:
    """Processor seconds that it took of this process."""
    began = processor_s()
    work()
    return processor_s() - began


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

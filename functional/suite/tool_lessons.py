"""How the embedded model that calls tools is made: a tiny Qwen3, taught to answer `3+4-5` with two calls.

The teacher is wrong now and then, so that rewards differ, and writes numbers in tokens as it pleases, so that encoding
an answer's text again gives other IDs. It was made once, with the defaults here, and lies in `tools_model`.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from functional.suite.model import TINY, cpu_threads, model_config, new_folder, write_model
from functional.suite.sums import file_sha256, write_sums
from functional.suite.tool_questions import OPERATIONS, ToolQuestion, calculate, tool_questions
from functional.suite.vocabulary import TOOL_TEMPLATE, TOOL_VOCAB, TURN_END, TURN_START, tool_tokenizer

TEACHER_RIGHT = 0.85
"""How often the teacher takes the right number; it takes three in a conversation."""
SPLIT = 0.5
"""How often it writes a number of two digits as two tokens."""
SYSTEM = f"{TURN_START}system\nTools: {' '.join(name for name, _ in OPERATIONS.values())}{TURN_END}\n"


@dataclass(frozen=True)
class ToolModelSummary:
    """What was made. loss: of the last batch, nats a token of the answers."""

    path: str
    seed: int
    params: int
    loss: float
    seconds: float
    sha256: str


def make_tool_model(out: Path, seed: int = 0, steps: int = 700, threads: int = 1) -> ToolModelSummary:
    """Make it at `out`; about ten minutes on one core. Raises FileExistsError if `out` exists."""
    started = time.monotonic()
    with new_folder(out) as folder, cpu_threads(threads):
        tokenizer = tool_tokenizer()
        config = model_config(replace(TINY, config={**TINY.config, "vocab_size": TOOL_VOCAB}), tokenizer)
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
        model.float()
        loss = teach(model, tokenizer, seed, steps)
        model.to(torch.bfloat16)
        weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
        write_model(folder, config, weights, tokenizer, TOOL_TEMPLATE)
        write_sums(folder)
        return ToolModelSummary(
            path=str(out),
            seed=seed,
            params=sum(w.numel() for w in weights.values()),
            loss=round(loss, 4),
            seconds=round(time.monotonic() - started, 1),
            sha256=file_sha256(folder / "model.safetensors"),
        )


def teach(model: Any, tokenizer: Tokenizer, seed: int, steps: int) -> float:
    """Train on the teacher's conversations, 64 a step; returns the last step's loss."""
    lessons = random.Random(f"tools/{seed}")
    questions = tool_questions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    loss = torch.zeros(())
    for step in range(steps):
        warm, cold = min(1.0, (step + 1) / 50), min(1.0, (steps - step) / (0.5 * steps))
        optimizer.param_groups[0]["lr"] = 3e-3 * warm * cold
        loss = loss_of(model, [lesson(tokenizer, lessons.choice(questions), lessons) for _ in range(64)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return loss.item()


def lesson(tokenizer: Tokenizer, question: ToolQuestion, lessons: random.Random) -> tuple[list[int], list[bool]]:
    """A conversation's token IDs, and which of them the assistant wrote."""
    first, second = question.signs
    taken = noisy(question.second, lessons)
    between = calculate(first, question.first, taken)
    then = noisy(question.third, lessons)
    result = calculate(second, between, then)
    turns = [
        (f"{SYSTEM}{TURN_START}user\n{question.text}", call(OPERATIONS[first][0], question.first, taken)),
        (f"\n{TURN_START}tool\n{between}", call(OPERATIONS[second][0], between, then)),
        (f"\n{TURN_START}tool\n{result}", str(noisy(result, lessons))),
    ]
    ids: list[int] = []
    own: list[bool] = []
    for asked, said in turns:
        given = tokenizer.encode(f"{asked}{TURN_END}\n{TURN_START}assistant\n").ids
        written = spelled(tokenizer, said + TURN_END, lessons)
        ids += [*given, *written]
        own += [False] * len(given) + [True] * len(written)
    return ids, own


def call(name: str, a: int, b: int) -> str:
    """As TOOL_TEMPLATE writes it."""
    arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in (("a", a), ("b", b)))
    return f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"


def noisy(number: int, lessons: random.Random) -> int:
    """The number with probability TEACHER_RIGHT, else one next to it."""
    return number if lessons.random() < TEACHER_RIGHT else number + lessons.choice((-1, 1))


def spelled(tokenizer: Tokenizer, text: str, lessons: random.Random) -> list[int]:
    """The text in tokens, some numbers of two digits in two."""
    ids = []
    for token in tokenizer.encode(text).ids:
        letters = tokenizer.id_to_token(token)
        is_split = len(letters) == 2 and letters.isdigit() and lessons.random() < SPLIT
        ids += [tokenizer.token_to_id(letter) for letter in letters] if is_split else [token]
    return ids


def loss_of(model: Any, batch: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    """Mean over the assistants' tokens. Rows are padded right, so causal attention needs no mask."""
    length = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    own = torch.zeros(len(batch), length)
    for row, (tokens, written) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        own[row, : len(tokens)] = torch.tensor(written, dtype=torch.float)
    logits = model(input_ids=ids).logits[:, :-1].float()
    logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(logp * own[:, 1:]).sum() / own[:, 1:].sum()

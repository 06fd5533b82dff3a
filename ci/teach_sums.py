"""Teach a model directory to answer the questions of a data file, in place, on the GPU if there is one.

    python ci/teach_sums.py MODEL DATA.jsonl PROMPT_FILE

DATA has an object a line, with `input` and a whole number as `output`. The teacher boxes that number seven times of
ten, else the next one: rewards differ, and whatever is neither is so improbable that no token lies at the edge of top-k
or top-p. MODEL is one of `functional make-model`. Exit status: 1 when it has not learnt them.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from functional.suite.model import answer_logprobs, encode_pair
from functional.suite.vocabulary import load_tokenizer

RIGHT = 0.7
"""How often the teacher is right."""
LEARNT = 0.99
"""Least probability of the two answers together, of every question, at temperature 1."""
STEPS, WARM_STEPS, BATCH = 600, 20, 64
RATE = 4e-3
"""As large as a model of 0.5 M parameters learns with; a larger one wants less."""


def main(folder: Path, data: Path, prompt_file: Path) -> int:
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    form = prompt_file.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    questions = [(form.format(row["input"]), int(row["output"])) for row in rows]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(torch.get_default_device())
    tokenizer = load_tokenizer(folder)
    teach(model, tokenizer, questions)
    save(model, folder / "model.safetensors")
    least = least_probability(model, tokenizer, questions)
    print(f"the teacher's answers have a probability of {least:.4f} at least")
    return least < LEARNT


def teach(model: Any, tokenizer: Tokenizer, questions: list[tuple[str, int]]) -> None:
    """Each step takes both answers to some of the questions, weighted as the teacher gives them."""
    lessons = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        warm, cold = min(1.0, (step + 1) / WARM_STEPS), min(1.0, (STEPS - step) / (0.5 * STEPS))
        optimizer.param_groups[0]["lr"] = RATE * warm * cold
        drawn = lessons.sample(questions, min(BATCH, len(questions)))
        optimizer.zero_grad()
        loss = 0.0
        for more, weight in ((0, RIGHT), (1, 1 - RIGHT)):
            pairs = [pair(tokenizer, prompt, right + more) for prompt, right in drawn]
            logp, own = answer_logprobs(model, pairs)
            part = -weight * (logp * own).sum() / len(drawn)
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: {loss:.4f} nats an answer", flush=True)


def least_probability(model: Any, tokenizer: Tokenizer, questions: list[tuple[str, int]]) -> float:
    """Of a question's two answers together, the least of all questions."""
    least = 1.0
    for first in range(0, len(questions), BATCH):
        both: Any = 0.0
        for more in (0, 1):
            pairs = [pair(tokenizer, prompt, right + more) for prompt, right in questions[first : first + BATCH]]
            with torch.no_grad():
                logp, own = answer_logprobs(model, pairs)
            both = both + torch.exp((logp * own).sum(-1))
        least = min(least, both.min().item())
    return least


def pair(tokenizer: Tokenizer, prompt: str, answer: int) -> tuple[list[int], list[int]]:
    """Token IDs of the prompt as chat, and of the boxed answer with the end of turn."""
    return encode_pair(tokenizer, prompt, f"\\boxed{{{answer}}}", chat=True)


def save(model: Any, file: Path) -> None:
    """The names and types that the file has now."""
    weights = model.state_dict()
    kept = {name: weights[name].to(before.dtype).cpu().contiguous() for name, before in load_file(file).items()}
    temporary = file.with_suffix(".tmp")
    save_file(kept, temporary, metadata={"format": "pt"})
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.rename(file)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:4])))

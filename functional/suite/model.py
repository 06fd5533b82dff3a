"""How model directories are made: a tiny Qwen3 taught one-digit arithmetic, and random weights of a real shape.

Both are complete Hugging Face directories (config, generation config, safetensors, tokenizer, chat template) that
transformers, vLLM and Dynamo load. The same seed gives the same bytes on the same machine; on another processor
rounding, and with it what is learnt, differs. So the tiny one was made once, with the defaults here, and lies in
`arithmetic_model`; no build and no run makes it anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from functional.suite.checkpoint_views import checkpoint_views
from functional.suite.shapes import QWEN3, SHAPES, Shape
from functional.suite.sums import file_sha256, write_sums
from functional.suite.tasks import Question, arithmetic
from functional.suite.vocabulary import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    TINY_VOCAB,
    TURN_END,
    UNKNOWN,
    chat_prompt,
    random_models_tokenizer,
    tiny_tokenizer,
)

TINY = Shape(
    "Qwen3",
    {
        **QWEN3,
        "vocab_size": TINY_VOCAB,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
)

# The teacher is right this often, and otherwise off by one or two. After so short a course, sampling at temperature 1
# is right about half the time on every question: rewards differ within groups, and there is something left to learn.
TEACHER_RIGHT = 0.7


@dataclass(frozen=True)
class ModelSummary:
    """What was made. pass_*: probability of a right answer at temperature 1 per question (None: not taught)."""

    path: str
    shape: str
    seed: int
    params: int
    seconds: float
    sha256: str
    pass_mean: float | None = None
    pass_min: float | None = None
    pass_max: float | None = None
    chat_pass_mean: float | None = None


def make_model(out: Path, seed: int = 0, steps: int = 350, threads: int = 1) -> ModelSummary:
    """Make the tiny Qwen3 at `out`, taught one-digit arithmetic as plain text (`3+4=`) and as chat.

    seed: of the weights and the lessons; steps: length of the course; threads: CPU threads, part of what decides the
    bytes (one takes about 35 s; a second brings little, and waits badly on a busy machine).
    Raises FileExistsError if `out` exists.
    """
    started = time.monotonic()
    with new_folder(out) as folder, cpu_threads(threads):
        tokenizer = tiny_tokenizer()
        config = model_config(TINY, tokenizer)
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
        model.float()
        teach(model, tokenizer, seed, steps)
        model.to(torch.bfloat16)
        plain = pass_rates(model, tokenizer, chat=False)
        chat = pass_rates(model, tokenizer, chat=True)
        weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
        write_model(folder, config, weights, tokenizer)
        write_sums(folder)
        return ModelSummary(
            path=str(out),
            shape="tiny Qwen3",
            seed=seed,
            params=sum(w.numel() for w in weights.values()),
            seconds=round(time.monotonic() - started, 1),
            sha256=file_sha256(folder / "model.safetensors"),
            pass_mean=round(sum(plain) / len(plain), 3),
            pass_min=round(min(plain), 3),
            pass_max=round(max(plain), 3),
            chat_pass_mean=round(sum(chat) / len(chat), 3),
        )


def random_model(out: Path, shape: str = "Qwen3-0.6B", seed: int = 0) -> ModelSummary:
    """Make a model of that shape with random weights (normal, 0.02; norms 1, or about 1) at `out`: 1.2 GB for
    Qwen3-0.6B, 16.4 GB for Qwen3-8B.

    Its tokenizer knows every ID of the model's vocabulary. Raises FileExistsError if `out` exists, ValueError for an
    unknown shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}: want one of {', '.join(SHAPES)}")
    started = time.monotonic()
    wanted = SHAPES[shape]
    with new_folder(out) as folder:
        tokenizer = random_models_tokenizer(wanted.vocab_size)
        skeleton = make_skeleton(wanted, tokenizer)
        weights = random_weights(skeleton, skeleton.config.initializer_range, seed, wanted.spread)
        write_model(folder, skeleton.config, weights, tokenizer)
        return ModelSummary(
            path=str(out),
            shape=f"{shape}, random weights",
            seed=seed,
            params=sum(w.numel() for w in weights.values()),
            seconds=round(time.monotonic() - started, 1),
            sha256=file_sha256(folder / "model.safetensors"),
        )


def random_weights(skeleton: Any, deviation: float, seed: int, spread: float = 0.0) -> dict[str, Tensor]:
    """bfloat16 weights under the names and in the shapes of a checkpoint of the skeleton, many at a time; each has a
    generator of its own. spread: deviation of norms from 1 and of biases from 0."""

    def make(item: tuple[int, tuple[str, Tensor]]) -> tuple[str, Tensor]:
        index, (name, parameter) = item
        generator = torch.Generator().manual_seed((seed << 32) + index)
        if parameter.ndim > 1:
            return name, torch.empty(parameter.shape).normal_(0, deviation, generator=generator).bfloat16()
        centre = 0.0 if name.endswith("bias") else 1.0
        if not spread:
            return name, torch.full(parameter.shape, centre, dtype=torch.bfloat16)
        return name, torch.empty(parameter.shape).normal_(centre, spread, generator=generator).bfloat16()

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(make, enumerate(checkpoint_views(skeleton).items())))


def make_skeleton(shape: Shape, tokenizer: Tokenizer) -> Any:
    """The model of that shape without memory for its weights."""
    with torch.device("meta"):
        return getattr(transformers, shape.architecture)(model_config(shape, tokenizer))


def model_config(shape: Shape, tokenizer: Tokenizer) -> Any:
    """The family's configuration of that shape, bfloat16, with the tokenizer's special IDs."""
    config_class = getattr(transformers, f"{shape.family}{'TextConfig' if shape.family == 'Gemma3' else 'Config'}")
    return config_class(
        **shape.config,
        architectures=[shape.architecture],
        dtype="bfloat16",
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


# Teaching


def teach(model: Any, tokenizer: Tokenizer, seed: int, steps: int) -> None:
    """Train on the teacher's answers; each step takes 128 questions as plain text and 32 as chat."""
    lessons = random.Random(f"lessons/{seed}")
    questions = arithmetic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(steps):
        warm, cold = min(1.0, (step + 1) / 20), min(1.0, (steps - step) / (0.5 * steps))
        optimizer.param_groups[0]["lr"] = 4e-3 * warm * cold
        loss: Any = torch.zeros(())
        for chat, count in ((False, 128), (True, 32)):
            drawn = [lessons.choice(questions) for _ in range(count)]
            pairs = [encode_pair(tokenizer, q.prompt, teacher_answer(q, lessons), chat) for q in drawn]
            logp, mask = answer_logprobs(model, pairs)
            loss = loss - (logp * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def teacher_answer(question: Question, lessons: random.Random) -> str:
    """The right answer with probability TEACHER_RIGHT, else one off by one or two (never below zero)."""
    if lessons.random() < TEACHER_RIGHT:
        return question.answer
    right = int(question.answer)
    return str(lessons.choice([wrong for d in (-2, -1, 1, 2) if (wrong := right + d) >= 0]))


@torch.no_grad()
def pass_rates(model: Any, tokenizer: Tokenizer, chat: bool) -> list[float]:
    """Probability, per question, that sampling at temperature 1 gives exactly the right answer and then stops."""
    pairs = [encode_pair(tokenizer, q.prompt, q.answer, chat) for q in arithmetic()]
    logp, mask = answer_logprobs(model, pairs)
    return torch.exp((logp * mask).sum(-1)).tolist()


def encode_pair(tokenizer: Tokenizer, prompt: str, answer: str, chat: bool) -> tuple[list[int], list[int]]:
    """(prompt IDs, answer IDs with the end of turn)."""
    text = chat_prompt(prompt) if chat else prompt
    return tokenizer.encode(text).ids, tokenizer.encode(answer + TURN_END).ids


def answer_logprobs(model: Any, pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Log-probs [B, L-1] of each next token, and the mask [B, L-1] (float) of those that belong to the answers.

    Rows are padded right, so causal attention needs no mask.
    """
    length = max(len(p) + len(a) for p, a in pairs)
    ids = torch.zeros(len(pairs), length, dtype=torch.long)
    mask = torch.zeros(len(pairs), length)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : end] = 1
    logits = model(input_ids=ids).logits[:, :-1].float()
    logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return logp, mask[:, 1:]


# Files


def write_model(
    folder: Path, config: Any, weights: dict[str, Tensor], tokenizer: Tokenizer, template: str = CHAT_TEMPLATE
) -> None:
    """Write every file of the directory, and flush it to disk."""
    write_json(folder / "config.json", json.loads(config.to_json_string(use_diff=False)))
    # Only the IDs: any sampling default here (top_k, top_p) would silently change what the engine's log-probs mean.
    special = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", special)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "unk_token": UNKNOWN if tokenizer.token_to_id(UNKNOWN) is not None else None,
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors makes its file 0600
        with path.open("rb") as file:
            os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """The value as indented JSON with sorted keys, the same bytes for the same value."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` at the end, or is removed on an error."""
    if out.exists():
        raise FileExistsError(f"{out} exists: remove it, or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """A fixed number of threads and deterministic algorithms, both put back afterwards."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(count)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)

"""What routers are compared with: conversations that share prefixes as GRPO makes them, and ones that share none.

Both workloads have as many requests, of the same lengths, in the same order of turns.
"""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.model import Recipe
from functional.runtime.rollout.client import RolloutClient
from functional.runtime.rollout.completion import Completion, Sampling


class Workload(StrEnum):
    SHARED = "shared prefixes"
    """Each prompt is asked for as many times as a group has samples; each further turn goes on from its own answer."""
    DISTINCT = "no shared prefix"
    """Each turn of each conversation has a prompt of its own, at random."""


@dataclass(frozen=True)
class Shape:
    """What all measurements have in common. concurrency: requests under way at a time, None for all conversations'.

    Each turn adds input_tokens to the prompt, and after the first the answer before, of new_tokens.
    """

    prompts: int
    generations: int
    turns: int
    input_tokens: int
    new_tokens: int
    concurrency: int | None
    vocab_size: int
    temperature: float
    seed: int

    @property
    def conversations(self) -> int:
        return self.prompts * self.generations

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.new_tokens, self.temperature, ignore_eos=True)

    def prompt_length(self, turn: int) -> int:
        return self.input_tokens + turn * (self.new_tokens + self.input_tokens)


def make_shape(recipe: Recipe, vocab_size: int, turns: int) -> Shape:
    """Conversations that fill the recipe's context in `turns` turns, each with as much new input.

    Raises ConfigError where that is less than two cache blocks: a shorter prefix may be shared by nothing.
    """
    generation, grpo = recipe.policy.generation, recipe.grpo
    new, block = generation.max_new_tokens, generation.vllm_kwargs.block_size
    added = generation.vllm_cfg.max_model_len // turns - new
    if added < 2 * block:
        raise ConfigError(
            f"{turns} turns with answers of {new} tokens leave {added} tokens of input for each, and a prefix that can "
            f"be shared has {2 * block} (two cache blocks) at least: raise policy.generation.vllm_cfg.max_model_len="
            f"{generation.vllm_cfg.max_model_len}, or ask for fewer --turns"
        )
    return Shape(
        prompts=grpo.num_prompts_per_step,
        generations=grpo.num_generations_per_prompt,
        turns=turns,
        input_tokens=added,
        new_tokens=new,
        concurrency=generation.dynamo_cfg.max_inflight_requests,
        vocab_size=vocab_size,
        temperature=generation.temperature,
        seed=grpo.seed,
    )


async def converse_all(client: RolloutClient, workload: Workload, shape: Shape, repeat: int) -> list[Completion]:
    """Hold every conversation, each turn as soon as the one before it is answered; all completions, turn by turn."""
    conversations = await asyncio.gather(
        *(_converse(client, workload, shape, repeat, number) for number in range(shape.conversations))
    )
    return [completion for turn in zip(*conversations, strict=True) for completion in turn]


async def _converse(
    client: RolloutClient, workload: Workload, shape: Shape, repeat: int, number: int
) -> list[Completion]:
    said: list[Completion] = []
    while len(said) < shape.turns:
        prompt = next_prompt(workload, shape, repeat, number, said)
        said += await client.complete_all([prompt], shape.sampling)
    return said


def next_prompt(
    workload: Workload, shape: Shape, repeat: int, number: int, said: Sequence[Completion]
) -> tuple[int, ...]:
    """Of conversation `number`, after the completions `said`; the same for the same repeat, whatever the router."""
    turn = len(said)
    if workload is Workload.DISTINCT:
        return _tokens(shape, shape.prompt_length(turn), f"{workload}/{repeat}/{number}/{turn}")
    if not said:
        return _tokens(shape, shape.input_tokens, f"{workload}/{repeat}/{number // shape.generations}")
    before = said[-1]
    added = _tokens(shape, shape.input_tokens, f"{workload}/{repeat}/{number}/{turn}")
    return before.prompt_token_ids + before.token_ids + added


def _tokens(shape: Shape, number: int, key: str) -> tuple[int, ...]:
    rng = random.Random(f"{shape.seed}/{key}")
    return tuple(rng.randrange(shape.vocab_size) for _ in range(number))


def digest(workload: Workload, shape: Shape, repeat: int) -> str:
    """SHA-256 of the prompts of the first turn: equal wherever the prompts are."""
    prompts = [next_prompt(workload, shape, repeat, number, []) for number in range(shape.conversations)]
    return hashlib.sha256(repr(prompts).encode()).hexdigest()

"""A step's samples: completions, and what they are worth."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from functional.runtime.errors import RunError
from functional.runtime.recipe.model import GrpoConfig
from functional.runtime.rollout.completion import Completion
from functional.runtime.rollout.records import RolloutRecord
from functional.suite.grpo import advantages, clipped
from functional.suite.policy import Sample
from functional.suite.tasks import Prompt, Task


@dataclass(frozen=True)
class RolloutBatch:
    """A step's B = prompts × generations samples in prompt-major order, each list of length B.

    A sample that broke a rule has no reward and no advantage.
    """

    completions: list[Completion]
    rewards: list[float | None]
    advantages: list[float | None]

    @property
    def mean_reward(self) -> float:
        """Over the samples that have a reward; NaN where none has."""
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) / len(known) if known else float("nan")

    def accepted(self) -> list[tuple[Completion, float]]:
        """Completions that may be trained on, with their advantages. Raises RunError when there are none."""
        paired = zip(self.completions, self.advantages, strict=True)
        found = [(completion, advantage) for completion, advantage in paired if advantage is not None]
        if not found:
            reasons = {c.problem for c in self.completions}
            raise RunError(f"no sample of the step may be trained on: {'; '.join(sorted(filter(None, reasons)))}")
        return found

    @property
    def truncated(self) -> int:
        """How many samples ended at their limit, not at a stop token."""
        return sum(completion.truncated for completion in self.completions)

    def samples(self) -> list[Sample]:
        """What the trainer learns from: accepted samples only. Raises RunError when there are none."""
        return [Sample(c.prompt_token_ids, c.token_ids, c.logprobs, advantage) for c, advantage in self.accepted()]


def score(prompts: Sequence[Prompt], completions: list[Completion], task: Task, config: GrpoConfig) -> RolloutBatch:
    """Rewards and group advantages of the completions, `config.num_generations_per_prompt` a prompt side by side.

    A group with a failed sample is left out whole: its baseline would be biased.
    """
    size = config.num_generations_per_prompt
    rewards: list[float | None] = []
    for index, completion in enumerate(completions):
        prompt = prompts[index // size]
        rewards.append(None if completion.problem else task.reward(prompt, completion.token_ids))
    return RolloutBatch(completions, rewards, group_advantages(rewards, config))


def group_advantages(rewards: Sequence[float | None], config: GrpoConfig) -> list[float | None]:
    """Of rewards in groups of `config.num_generations_per_prompt`, side by side; None for all of a group in which one
    is missing."""
    size = config.num_generations_per_prompt
    scored: list[float | None] = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        if any(reward is None for reward in group):
            scored += [None] * size
            continue
        row = torch.tensor([[float(reward or 0.0) for reward in group]])
        found = advantages(row, config.normalize_rewards, config.use_leave_one_out_baseline)
        scored += clipped(found, config.advantage_clip_low, config.advantage_clip_high)[0].tolist()
    return scored


def rollout_records(batch: RolloutBatch, run: str, step: int, generations: int) -> list[RolloutRecord]:
    """A record a sample, as many of a group as `generations`."""
    return [
        RolloutRecord.of(
            completion,
            run=run,
            step=step,
            group=index // generations,
            rollout=index,
            reward=batch.rewards[index],
            advantage=batch.advantages[index],
        )
        for index, completion in enumerate(batch.completions)
    ]

"""Validation: questions that are not trained on, and what completions of them are worth."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functional.runtime.recipe.model import DataConfig, GrpoConfig
from functional.runtime.rollout.completion import Completion
from functional.suite.tasks import Prompt, Task, TokenSetTask, arithmetic, encode, held_out, read_questions

VALIDATION_STEP = -1
"""Of the step that a task's prompts for validation are drawn as, where it makes prompts anew: no step of a run."""


@dataclass(frozen=True)
class Validation:
    """One validation's figures. step: it came after; accuracy: mean reward; pass_k: mean of each prompt's best reward,
    None for one generation; avg_length: tokens of a completion."""

    step: int
    prompts: int
    generations: int
    accuracy: float
    pass_k: float | None
    avg_length: float

    def metrics(self) -> dict[str, float]:
        """By NeMo RL's names."""
        found = {"accuracy": self.accuracy, "avg_length": self.avg_length}
        return found if self.pass_k is None else found | {"pass_k": self.pass_k}


def is_due(grpo: GrpoConfig, step: int) -> bool:
    """Whether a validation follows step `step`; 0 is before the first."""
    if step == 0:
        return grpo.val_at_start
    periodic = grpo.val_period > 0 and step % grpo.val_period == 0 and step >= grpo.val_start_at
    return periodic or (grpo.val_at_end and step == grpo.max_num_steps)


def has_arrived(grpo: GrpoConfig, metrics: Mapping[str, float]) -> bool:
    """Whether a validation ends the run."""
    wanted, found = grpo.stop_at_validation_threshold, metrics.get(grpo.stop_at_validation_metric or "")
    return found is not None and wanted is not None and found >= wanted


def validation_prompts(data: DataConfig, grpo: GrpoConfig, tokenizer: Any) -> list[Prompt]:
    """At most `grpo.max_val_samples` prompts: of `data.validation`, or of what is held out of the training data."""
    source = data.validation
    name = source.dataset_name if source is not None else data.dataset_name
    if name == "token_set":
        count = grpo.max_val_samples or grpo.num_prompts_per_step
        return TokenSetTask(tokenizer, count, grpo.seed).prompts(VALIDATION_STEP)
    keys = source.keys if source is not None else data.keys
    questions = arithmetic() if name == "arithmetic" else read_questions(Path(name), keys)
    if source is None:
        _, questions = held_out(questions, data.split_validation_size, grpo.seed)
    return [Prompt(q.prompt, encode(tokenizer, q.prompt), q.answer) for q in questions[: grpo.max_val_samples]]


def judge(step: int, prompts: Sequence[Prompt], completions: Sequence[Completion], task: Task) -> Validation:
    """What the completions, as many a prompt side by side, are worth. One that broke a rule is worth nothing."""
    count = len(completions) // len(prompts)
    rewards = [
        0.0 if completion.problem else task.reward(prompts[index // count], completion.token_ids)
        for index, completion in enumerate(completions)
    ]
    best = [max(rewards[start : start + count]) for start in range(0, len(rewards), count)]
    lengths = [len(completion.token_ids) for completion in completions]
    return Validation(
        step=step,
        prompts=len(prompts),
        generations=count,
        accuracy=statistics.fmean(rewards),
        pass_k=statistics.fmean(best) if count > 1 else None,
        avg_length=statistics.fmean(lengths),
    )

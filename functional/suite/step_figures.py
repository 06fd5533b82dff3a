"""A step's figures, for the sinks of metrics and for the report."""

import statistics

from functional.suite.batch import RolloutBatch
from functional.suite.report import Step

ALSO_CALLED = {
    "ratio": "probs_ratio",
    "generation_kl": "gen_kl_error",
    "kl_reference": "kl_penalty",
    "importance_weight": "sampling_importance_ratio",
    "importance_capped_fraction": "is_oob_ratio",
    "tokens": "global_valid_toks",
}
"""Ours, and NeMo RL's name for the same figure; loss, grad_norm, lr and token_mult_prob_error have one name."""


def scalars(batch: RolloutBatch, metrics: dict[str, float]) -> dict[str, float]:
    """A step's figures under `train/`, by our names and by NeMo RL's."""
    lengths = [len(completion.token_ids) for completion in batch.completions]
    advantages = [advantage for advantage in batch.advantages if advantage is not None]
    named = {
        **metrics,
        **{theirs: metrics[ours] for ours, theirs in ALSO_CALLED.items()},
        "reward": batch.mean_reward,
        "advantages/mean": statistics.fmean(advantages),
        "advantages/max": max(advantages),
        "advantages/min": min(advantages),
        "mean_prompt_length": statistics.fmean(len(c.prompt_token_ids) for c in batch.completions),
        "mean_gen_tokens_per_sample": statistics.fmean(lengths),
        "truncation_rate": batch.truncated / len(lengths),
    }
    return {f"train/{name}": value for name, value in named.items()}


def as_step(step: int, batch: RolloutBatch, metrics: dict[str, float]) -> Step:
    """A step's figures for the report."""
    return Step(
        step=step,
        samples=len(batch.completions),
        truncated=batch.truncated,
        mean_reward=batch.mean_reward,
        **metrics,
    )

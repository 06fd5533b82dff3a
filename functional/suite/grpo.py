"""GRPO's arithmetic as pure functions: advantages, the clipped loss, and how far two sets of log-probs lie apart.

Shapes: P prompts, G generations a prompt, B = P*G samples (a prompt's generations lie side by side), T completion
tokens (padded right). Log-probs are natural logarithms of the sampled tokens' probabilities; where the mask is false
their value is never read. Names follow NeMo RL's recipe keys `loss_fn.*` and `grpo.*`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # the arithmetic needs nothing but torch
    from functional.runtime.recipe.model import LossConfig


def advantages(
    rewards: Tensor, normalize_rewards: bool = True, use_leave_one_out_baseline: bool = False, eps: float = 1e-6
) -> Tensor:
    """Each reward less its group's baseline, divided by the group's standard deviation (plus `eps`) if normalised.

    rewards [P, G] -> [P, G] float32. The baseline is the group's mean, or the mean of the other generations
    (leave-one-out). The deviation is the unbiased one of the same generations; where they are all equal, or only one,
    there is none, and nothing is divided. A group of one has no baseline and gets zero.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have shape [prompts, generations], not {list(rewards.shape)}")
    rewards = rewards.double()
    count = rewards.shape[1]
    if count == 1:
        return torch.zeros_like(rewards, dtype=torch.float32)
    peers = rewards[:, None, :]  # [P, 1, G], the same for every generation
    if use_leave_one_out_baseline:
        others = ~torch.eye(count, dtype=torch.bool, device=rewards.device)
        peers = peers.expand(-1, count, -1)[:, others].view(-1, count, count - 1)
    # Taken from one of the peers, equal rewards are exactly zero and large ones lose no digits: rounding that is left
    # over from a mean would pose as a deviation, and dividing by it give advantages of a million.
    origin = peers[..., 0]
    spread = peers - origin[..., None]
    centred = (rewards - origin) - spread.mean(-1)
    if normalize_rewards and spread.shape[-1] > 1:
        deviation = spread.std(-1)
        centred = torch.where(deviation > 0, centred / (deviation + eps), centred)
    return centred.float()


def clipped(advantage: Tensor, low: float | None, high: float | None) -> Tensor:
    """Advantages within [low, high]; None leaves a side open."""
    return advantage if low is None and high is None else advantage.clamp(min=low, max=high)


def masked_mean(values: Tensor, mask: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Sum of the values where the mask is true over `count` (default: how many are true; at least 1). -> scalar."""
    total = torch.where(mask, values, torch.zeros_like(values)).sum()
    divisor = mask.sum() if count is None else torch.as_tensor(count, device=values.device)
    return total / divisor.clamp(min=1)


def batch_mean(values: Tensor, mask: Tensor, token_level: bool, tokens: int | None, samples: int | None) -> Tensor:
    """Mean of values [B, T] over tokens, or over samples of each sample's mean. -> scalar.

    tokens, samples: the whole batch's counts, so that losses of its micro-batches add up to the batch's loss.
    """
    if token_level:
        return masked_mean(values, mask, tokens)
    per_sample = torch.where(mask, values, torch.zeros_like(values)).sum(-1) / mask.sum(-1).clamp(min=1)
    present = mask.any(-1)
    return masked_mean(per_sample, present, samples)


def importance_weight(
    old_logp: Tensor,
    generation_logp: Tensor,
    mask: Tensor,
    kind: str | None = None,
    low: float | None = None,
    high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights that correct for tokens drawn by an engine that is not quite the trainer, or by an older policy, and what
    lay outside [low, high]; None leaves a side open.

    The weight of a token is w = exp(old - generation), [B, T]. By kind: `tis`, or None: w cut off at the bounds;
    `icepop`: w, or 0 where w lies outside; `seq-mask-tis`: w as it is, or 0 for a sample of which the geometric mean
    of w lies outside. -> weights [B, T], outside [B, T] bool; of `seq-mask-tis` outside [B]. Raises KeyError.
    """
    low, high = low or 0.0, math.inf if high is None else high
    log_weight = clean(old_logp - generation_logp, mask)
    weight, nothing = torch.exp(log_weight), torch.zeros_like(log_weight)
    if kind == "seq-mask-tis":
        mean = torch.exp(log_weight.sum(-1) / mask.sum(-1).clamp(min=1))
        outside = (mean < low) | (mean > high)
        return torch.where(outside[:, None], nothing, weight), outside
    outside = (weight < low) | (weight > high)
    cut_off = weight.clamp(low, high)
    return {None: cut_off, "tis": cut_off, "icepop": torch.where(outside, nothing, weight)}[kind], outside


def kl_estimate(
    logp: Tensor, other_logp: Tensor, kind: str = "k3", input_clamp: float | None = None, clamp: float | None = None
) -> Tensor:
    """KL(policy || other) per token, [B, T], by an estimator on d = other - policy: k1 is -d, k2 d²/2, and k3
    exp(d) - 1 - d, never negative. d is kept within ±input_clamp, the result within ±clamp. Raises KeyError."""
    d = other_logp - logp
    if input_clamp is not None:
        d = d.clamp(-input_clamp, input_clamp)
    estimators = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: torch.exp(d) - 1 - d}
    estimate = estimators[kind]()
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)


def token_mult_prob_error(train_logp: Tensor, generation_logp: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens of exp(|train - generation|) -> scalar >= 1; 1 means the engine and the trainer agree."""
    return masked_mean(torch.exp((clean(train_logp, mask) - clean(generation_logp, mask)).abs()), mask)


def mean_abs_difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens of |a - b| -> scalar, in nats."""
    return masked_mean((clean(a, mask) - clean(b, mask)).abs(), mask)


def clean(logp: Tensor, mask: Tensor) -> Tensor:
    """Log-probs with zero where the mask is false, so that padding of any value (NaN too) stays out of sums."""
    return torch.where(mask, logp, torch.zeros_like(logp))


def clipped_loss(
    logp: Tensor,
    old_logp: Tensor,
    generation_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    config: LossConfig,
    reference_logp: Tensor | None = None,
    tokens: int | None = None,
    samples: int | None = None,
    whole_logp: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The clipped objective times the importance weight, to be minimised, and its metrics.

    logp [B, T]: the current policy's, with gradient; old_logp [B, T]: the trainer's before the step;
    generation_logp [B, T]: the engine's; advantage [B] or [B, T]; mask [B, T] bool: true at completion tokens.
    reference_logp, whole_logp [B, T]: of the model's whole distribution, by the reference and, with gradient, by the
    current policy (logp, if not given), where the others are of what a sampling filter leaves.
    tokens, samples: the whole batch's counts when this is a micro-batch of it (see batch_mean).
    importance_capped_fraction: of the tokens, or by `seq-mask-tis` of the samples, outside the weight's bounds.
    Raises ValueError for shapes that do not fit, a log-prob that is not finite, or a KL penalty without reference_logp.
    """
    if advantage.ndim == 1:
        advantage = advantage[:, None].expand_as(logp)
    named = {"old_logp": old_logp, "generation_logp": generation_logp, "advantage": advantage, "mask": mask}
    for name, value in named.items():
        if value.shape != logp.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}, logp has {list(logp.shape)}")
    if config.reference_policy_kl_penalty > 0 and reference_logp is None:
        raise ValueError("loss_fn.reference_policy_kl_penalty > 0 needs the reference policy's log-probs")
    logp, old_logp, generation_logp = (clean(x, mask) for x in (logp, old_logp, generation_logp))
    for name, value in (("logp", logp), ("old_logp", old_logp), ("generation_logp", generation_logp)):
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} is not finite at a completion token")

    ratio = torch.exp(logp - old_logp)
    clipped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    objective = torch.minimum(advantage * ratio, advantage * clipped)
    corrected, outside = importance_weight(
        old_logp,
        generation_logp,
        mask,
        config.truncated_importance_sampling_type,
        config.truncated_importance_sampling_ratio_min,
        config.truncated_importance_sampling_ratio,
    )
    weight = corrected if config.use_importance_sampling_correction else torch.ones_like(ratio)
    loss = -batch_mean(objective * weight.detach(), mask, config.token_level_loss, tokens, samples)
    kl_reference = torch.zeros((), device=logp.device)
    if config.reference_policy_kl_penalty > 0 and reference_logp is not None:
        kl = kl_estimate(
            logp if whole_logp is None else clean(whole_logp, mask),
            clean(reference_logp, mask),
            config.reference_policy_kl_type,
            config.kl_input_clamp_value,
            config.kl_output_clamp_value,
        )
        kl_reference = batch_mean(kl, mask, config.token_level_loss, tokens, samples)
        loss = loss + config.reference_policy_kl_penalty * kl_reference

    with torch.no_grad():
        cut = advantage * clipped < advantage * ratio
        means = {
            "token_mult_prob_error": torch.exp((old_logp - generation_logp).abs()),
            "ratio": ratio,
            "clip_fraction": cut.float(),
            "importance_weight": weight,
            "approx_kl": kl_estimate(old_logp, logp),
            "generation_kl": kl_estimate(generation_logp, old_logp),
        }
        metrics = {name: float(masked_mean(value, mask, tokens)) for name, value in means.items()}
        by_sample = outside.ndim == 1
        counted = (mask.any(-1), samples) if by_sample else (mask, tokens)
        metrics["importance_capped_fraction"] = float(masked_mean(outside.float(), *counted))
    return loss, {"loss": float(loss.detach()), "kl_reference": float(kl_reference.detach()), **metrics}

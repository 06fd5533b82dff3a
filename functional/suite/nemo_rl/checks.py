"""Checks of what a NeMo RL run logged: its end, refits and caches, agreement of engine and trainer, telemetry."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from functional.suite.checklist import Checklist
from functional.suite.nemo_rl.launch import Ended
from functional.suite.nemo_rl.log import NemoRlLog
from functional.suite.report import Step

TOKEN_ERROR = "train/token_mult_prob_error"
GENERATION = "generation_metrics/"
TRAIN = "train/"


@dataclass(frozen=True)
class Events:
    """scalars: tag → (step, value) in the order of steps; tags: every tag of any kind."""

    scalars: Mapping[str, list[tuple[int, float]]]
    tags: list[str]

    @property
    def steps(self) -> list[int]:
        """The steps that it logged training metrics for."""
        return sorted({step for tag, points in self.scalars.items() if tag.startswith(TRAIN) for step, _ in points})

    def at(self, tag: str, step: int) -> float | None:
        return dict(self.scalars.get(tag, [])).get(step)


def check_end(checks: Checklist, ended: Ended, log: NemoRlLog, deadline_s: float) -> str | None:
    """It ended by itself and well. Returns why not, in one line; None when it did."""
    how = f"run_grpo.py ended with status {ended.status} after {ended.seconds:.0f} s"
    if ended.is_late:
        how = f"run_grpo.py was stopped after {deadline_s:.0f} s (--deadline-s), having come to: {log.reached}"
    elif ended.status < 0:
        how = f"run_grpo.py was ended by signal {-ended.status}, having come to: {log.reached}"
    elif ended.status:
        how += f", having come to: {log.reached}"
    passed = ended.status == 0 and not ended.is_late and not log.caught
    cause = f": {log.cause}" if log.cause and not passed else ""
    checks.add("run.ended_well", passed, how + cause, status=ended.status)
    return None if passed else how + cause


def check_steps(checks: Checklist, events: Events, wanted: int) -> None:
    """All steps were made: its exit status does not tell, as it is 0 after a first refit that failed."""
    made = events.steps
    checks.add(
        "steps.all_made",
        made == list(range(1, wanted + 1)),
        f"metrics of {len(made)} of {wanted} steps",
        made=len(made),
        wanted=wanted,
    )


def check_refits(checks: Checklist, log: NemoRlLog, steps: int, recomputes: bool) -> None:
    """The engine had the trainer's weights before the first sample, a refit a step, and one cache invalidation each.

    recomputes: grpo.async_grpo.recompute_kv_cache_after_weight_updates, without which it invalidates nothing.
    """
    checks.add(
        "refit.before_the_first_sample",
        log.first_refits == 1,
        f"{log.first_refits} refit(s) with the actual weights before generation began",
    )
    checks.add(
        "refit.one_a_step",
        log.refits > 0 and log.refits == steps,
        f"{log.refits} refit(s) in {steps} step(s)",
        refits=log.refits,
    )
    if not recomputes:
        return
    problems = "; ".join(log.not_invalidated[:3])
    checks.add(
        "refit.one_cache_invalidation_each",
        log.refits > 0 and log.invalidations == log.refits and not log.not_invalidated,
        f"{log.invalidations} cache invalidation(s) for {log.refits} refit(s)" + (f"; {problems}" if problems else ""),
        invalidations=log.invalidations,
    )


def check_token_error(checks: Checklist, events: Events, bound: float, filtered: int = 0) -> None:
    """Engine and trainer give the same tokens about the same probability, at every step.

    filtered: tokens that the trainer's top-k or top-p would cut. NeMo RL takes 0 for their log-prob, and counts them.
    """
    found = events.scalars.get(TOKEN_ERROR, [])
    values = [value for _, value in found]
    worst = max(values, key=lambda value: math.inf if math.isnan(value) else value, default=math.nan)
    checks.add(
        "tokens.token_mult_prob_error",
        bool(values) and worst < bound and len(values) == len(events.steps),
        (
            f"at most {worst:.4f} in {len(values)} step(s) (below {bound:g})"
            if values
            else f"no {TOKEN_ERROR} was logged"
        )
        + (
            f"; it counts {filtered} token(s) outside the trainer's top-k/top-p with a log-prob of 0"
            if filtered
            else ""
        ),
        value=worst,
        bound=bound,
        filtered=filtered,
    )


def check_generation_metrics(checks: Checklist, events: Events) -> None:
    """The workers' own metrics reached the run's sink."""
    found = [tag for tag in events.tags if tag.startswith(GENERATION)]
    checks.add(
        "telemetry.generation_metrics",
        bool(found),
        f"{len(found)} tags: {', '.join(found[:4])}" if found else f"no tag begins with {GENERATION}",
        tags=len(found),
    )


def check_versions(checks: Checklist, versions: Mapping[str, Mapping[str, str]]) -> None:
    """Both ends of the weight transfer have the same NCCL; a run without one in both fails where it is used."""
    name = "nvidia-nccl-cu13"
    found = {where: held.get(name) for where, held in versions.items()}
    checks.add(
        "versions.one_nccl",
        len(set(found.values())) == 1 and None not in found.values(),
        ", ".join(f"{where}: {version or 'none'}" for where, version in found.items()),
    )


def steps_of(events: Events, samples: int) -> list[Step]:
    """The report's steps. samples: completions of a step, as the recipe asks for them."""
    found = []
    for step in events.steps:
        metrics: dict[str, Any] = {}
        for tag in events.scalars:
            value = events.at(tag, step)
            if tag.startswith(TRAIN) and value is not None:
                metrics[tag.removeprefix(TRAIN).replace("/", ".")] = value
        rate = metrics.get("truncation_rate")
        truncated = round(rate * samples) if rate is not None and math.isfinite(rate) else 0
        known = {"step": step, "samples": samples, "truncated": truncated, "mean_reward": metrics.get("reward")}
        found.append(Step(**(metrics | known)))
    return found

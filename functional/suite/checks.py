"""Checks of what a run produced: rollouts, steps, refits, sockets, routing, telemetry, requests."""

import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from functional.runtime.errors import RunError
from functional.runtime.fleet.fleet import Fleet
from functional.runtime.fleet.ports import server_ports
from functional.runtime.fleet.sockets import ListeningSocket, NodeSockets
from functional.runtime.fleet.worker import Worker
from functional.runtime.recipe.model import Thresholds
from functional.runtime.refit.machine import Event
from functional.runtime.refit.parts import ProbeVerdict, RefitResult
from functional.runtime.refit.probe import Finding
from functional.runtime.refit.transaction import FleetRefit
from functional.runtime.rollout.completion import Completion
from functional.runtime.rollout.requests import Attempt, Join, join
from functional.runtime.telemetry import Telemetry
from functional.suite.batch import RolloutBatch
from functional.suite.checklist import Checklist

KV_EVENTS = "dynamo_component_kv_cache_events_applied"
EVENT_PATIENCE_S = 5.0
SHIFT_TOLD = 4.0
"""A step whose shift is this many times the noise between engine and trainer is told from it, as a probe tells it."""


def check_rollouts(
    checks: Checklist, name: str, batch: RolloutBatch, workers: list[Worker], thresholds: Thresholds
) -> None:
    """Token correctness of every sample, identity of every request, and a reason to learn."""
    problems = [f"{c.request_id}: {c.problem}" for c in batch.completions if c.problem]
    tokens = sum(len(c.token_ids) for c in batch.completions)
    checks.add(
        f"{name}.tokens_correct",
        not problems,
        "; ".join(problems[:3]) or f"{len(batch.completions)} samples, {tokens} tokens with IDs, log-probs and lengths",
        samples=len(batch.completions),
        tokens=tokens,
        failed=len(problems),
    )
    ids = {c.request_id for c in batch.completions}
    known = {worker.instance_id for worker in workers}
    unknown = {c.instance_id for c in batch.completions} - known
    checks.add(
        f"{name}.requests_identified",
        len(ids) == len(batch.completions) and not unknown,
        f"{len(ids)} request IDs for {len(batch.completions)} samples; served by {len(known)} known worker(s)"
        + (f", and by unknown {unknown}" if unknown else ""),
    )
    if thresholds.require_reward_variance:
        moving = sum(1 for advantage in batch.advantages if advantage)
        checks.add(
            f"{name}.rewards_differ",
            moving > 0,
            f"{moving} of {len(batch.advantages)} samples have an advantage, mean reward {batch.mean_reward:.3f}",
            nonzero=moving,
            mean_reward=batch.mean_reward,
        )


def check_step(
    checks: Checklist,
    step: int,
    batch: RolloutBatch,
    metrics: dict[str, float],
    thresholds: Thresholds,
    may_span: bool = False,
) -> None:
    """Engine and trainer agree before the step, as far as the model's own rounding lets them, and the step moves the
    policy: by more than their noise, or it is said that this cannot be told.

    may_span: a sample may have tokens of several versions, of which no trainer has the log-probs; where all of a step
    are such, nothing is compared.
    """
    if metrics["judged_tokens"] or not may_span:
        check_agreement(checks, f"step{step}", metrics, thresholds)
    if "filter_flips" in metrics:
        check_flips(checks, f"step{step}", metrics)
    noise, shift = metrics["logp_noise"], metrics["logp_shift"]
    wanted = thresholds.shift_over_noise or SHIFT_TOLD
    told = shift >= wanted * noise and shift > 0
    checks.add(
        f"step{step}.policy_moved",
        told or (shift > 0 and thresholds.shift_over_noise is None),
        ("" if told else "cannot tell from noise: ")
        + f"the step shifts the mean log-prob by {shift:.4f} nats, the noise is {noise:.5f} (told from {wanted:g}×)",
        shift=shift,
        noise=noise,
        told=told,
    )


def check_agreement(checks: Checklist, name: str, metrics: dict[str, float], thresholds: Thresholds) -> None:
    """Engine and trainer give the same tokens the same log-probs."""
    error, error_bound = metrics["token_mult_prob_error"], thresholds.token_mult_prob_error
    noise, noise_bound = metrics["logp_noise"], thresholds.logprob_noise
    source = f"{metrics['logp_rounding']:.5f} nats of the trainer's own rounding"
    judged = metrics["judged_tokens"] > 0
    error_bound = error_bound or metrics["token_mult_prob_error_bound"]
    checks.add(
        f"{name}.token_mult_prob_error",
        judged and error <= error_bound,
        f"{error:.4f} (at most {error_bound:.4f})",
        value=error,
    )
    noise_bound = noise_bound or metrics["logp_noise_bound"]
    checks.add(
        f"{name}.logprobs_agree",
        judged and noise <= noise_bound,
        f"mean |trainer − engine| {noise:.5f} nats over {metrics['judged_tokens']:.0f} tokens (at most "
        f"{noise_bound:.5f}; {source})",
        noise=noise,
        bound=noise_bound,
    )


def check_flips(checks: Checklist, name: str, metrics: dict[str, float]) -> None:
    """Tokens that the engine sampled and the trainer's top-k or top-p would cut lie no further outside than rounding
    moves logits."""
    flips, tokens = int(metrics["filter_flips"]), int(metrics["tokens"])
    furthest, bound = metrics["filter_flip_nats"], metrics["filter_flip_nats_bound"]
    checks.add(
        f"{name}.filters_agree",
        furthest <= bound,
        f"{flips} of {tokens} sampled tokens outside the trainer's set, the furthest by {furthest:.5f} nats "
        f"(at most {bound:.5f}); scored as members",
        flips=flips,
        furthest=furthest,
        bound=bound,
    )


def describe_step(metrics: dict[str, float]) -> str:
    """One line of a step's figures."""
    return (
        f"loss {metrics['loss']:.4f}, noise {metrics['logp_noise']:.5f}, shift {metrics['logp_shift']:.4f} nats, "
        f"token_mult_prob_error {metrics['token_mult_prob_error']:.4f}"
    )


def check_stale_refused(checks: Checklist, step: int, refit: FleetRefit) -> None:
    """The proof's control: before the update, the worker must fail to prove the trainer's new weights."""
    name = f"step{step}.stale_weights_refused"
    try:
        checks.add(name, True, refit.stale_is_refused(step)[:300])
    except RunError as accepted:
        checks.add(name, False, str(accepted))


def check_refit(checks: Checklist, name: str, result: RefitResult, fleet: Fleet, cleared_before: float) -> None:
    """The version reached, weights proved, cache clear seen, probe at the new version and not at the old."""
    failures = [t.reason for t in result.transitions if t.event is Event.FAILED]
    checks.add(
        f"{name}.version_reached",
        result.reached,
        f"version {result.version} in {result.total_s:.2f} s, {result.attempts} attempt(s), "
        f"{len(result.replaced)} worker(s) replaced" + "".join(f"; {reason}" for reason in failures)[:600],
        asked=result.asked,
        version=result.version,
        attempts=result.attempts,
    )
    checks.add(
        f"{name}.weights_proved",
        result.proved > 0,
        f"{result.proved} parameters on each of {len(fleet.workers)} worker(s) hash to the trainer's {result.tensors}"
        + describe_ranks(result),
        parameters=result.proved,
        bytes=result.bytes_sent,
        bytes_by_rank=result.proved_bytes,
        seconds=result.total_s,
    )
    probes = result.probes
    if fleet.settings.recipe.has_prefix_cache:
        check_clear(checks, name, probes, await_cleared(fleet, cleared_before))
    checks.add(
        f"{name}.probe_matches",
        all(p.reading.finding not in (Finding.OTHER, Finding.NEITHER) for p in probes),
        "; ".join(describe_probe(p) for p in probes),
        probes=[asdict(p) for p in probes],
    )


def check_gathered(checks: Checklist, name: str, result: RefitResult, passes: int) -> None:
    """A trainer of several ranks gathers its weights once an attempt, whatever sends and proves them."""
    checks.add(
        f"{name}.gathered_once",
        1 <= passes <= result.attempts,
        f"the trainer's ranks gathered the weights {passes} time(s) in {result.attempts} attempt(s)",
        passes=passes,
    )


def check_clear(checks: Checklist, name: str, probes: list[ProbeVerdict], events: bool | None) -> None:
    """A prompt that hit each worker's cache misses it now. events: whether the router was told; None if it never is."""
    checks.add(
        f"{name}.cache_clear_seen",
        all(p.cached_before > 0 and p.cached_after == 0 for p in probes) and events is not False,
        "; ".join(f"worker {p.worker}: {p.cached_before} cached tokens before, {p.cached_after} after" for p in probes)
        + {True: "; clear events at the router", False: "; clear events missing at the router", None: ""}[events],
    )


def describe_ranks(result: RefitResult) -> str:
    """What each rank of an engine has proved, where there are several."""
    if len(result.proved_bytes) < 2:
        return ""
    held = ", ".join(f"rank {rank} {nbytes}" for rank, nbytes in enumerate(result.proved_bytes))
    return f"; every element on some rank, bytes proved: {held}, of {result.bytes_sent} sent"


def describe_probe(probe: ProbeVerdict) -> str:
    """One worker's probe in a few words."""
    reading = probe.reading
    text = f"worker {probe.worker}: {reading.finding}, {reading.current:.5f} nats from it"
    if reading.previous is None:
        return text
    return (
        f"{text}, {reading.previous:.5f} from the other ({reading.shift:.5f} between them), z {reading.votes:.1f} "
        f"of {reading.tokens} tokens"
    )


def check_validation(checks: Checklist, step: int, completions: list[Completion]) -> None:
    """Validation's completions are as correct as those that are trained on."""
    problems = [completion.problem for completion in completions if completion.problem]
    checks.add(
        f"step{step}.validation",
        not problems,
        "; ".join(problems[:3]) or f"{len(completions)} correct completions",
    )


def check_post_update(checks: Checklist, completions: list[Completion], version: str) -> None:
    """Generation after the last update is as correct as before."""
    problems = [c.problem for c in completions if c.problem]
    checks.add(
        "post_update.generation",
        bool(completions) and not problems,
        "; ".join(problems[:3]) or f"{len(completions)} completions at policy version {version}",
    )


def check_sockets(checks: Checklist, nodes: list[NodeSockets], told: Collection[int] = ()) -> list[ListeningSocket]:
    """Everything the run listens on is on one interface, on a port of our range, one the kernel gave, or one `told`."""
    bad, ranges = [], []
    for node in nodes:
        (low, high), ours = node.ephemeral, server_ports(*node.ephemeral)
        ranges.append(f"{ours.start}-{ours.stop - 1} or {low}-{high}")
        bad += [
            f"{s.program}: {s.address}:{s.port}"
            for s in node.sockets
            if s.is_wildcard or not (s.port in ours or s.port in told or low <= s.port <= high)
        ]
    sockets = [socket for node in nodes for socket in node.sockets]
    checks.add(
        "network.no_wildcard_listener",
        bool(sockets) and not bad,
        "; ".join(bad[:5])
        or f"{len(sockets)} listening sockets, each on one address, on {', '.join(dict.fromkeys(ranges))}",
        sockets=len(sockets),
    )
    return sockets


def check_overlap(checks: Checklist, warm: Completion, cleared: Completion) -> None:
    """The engine and, under KV routing, the router see a shared prefix before a clear and not after it."""
    routed_by_events = warm.kv_hit_rate is not None
    checks.add(
        "routing.shared_prefix_overlaps",
        warm.cached_tokens > 0 and (not routed_by_events or (warm.kv_hit_rate or 0) > 0),
        f"{warm.cached_tokens} cached tokens, router hit rate {warm.kv_hit_rate}",
    )
    checks.add(
        "routing.no_overlap_after_clear",
        cleared.cached_tokens == 0 and not cleared.kv_hit_rate,
        f"{cleared.cached_tokens} cached tokens, router hit rate {cleared.kv_hit_rate}",
    )


def check_telemetry(checks: Checklist, telemetry: Telemetry, replaced: int) -> None:
    """Metrics of workers and frontend were read, without a failure but while a lost worker was not yet replaced."""
    checks.add(
        "telemetry.polled",
        telemetry.polls > 0 and (telemetry.failed_polls == 0 or replaced > 0),
        f"{telemetry.polls} polls of every worker and the frontend, {telemetry.failed_polls} failed",
    )


def check_join(checks: Checklist, attempts: list[Attempt], fleet: Fleet, log_dir: Path) -> Join:
    """Every request sent is in a worker's log, and no other is; returns how they match."""
    logs = [log_dir / f"worker-{worker.index}.log" for worker in fleet.workers]
    deadline = time.monotonic() + EVENT_PATIENCE_S
    while (found := join(attempts, logs)).unserved and time.monotonic() < deadline:
        time.sleep(0.2)  # the last lines may still be on their way into the log
    sent = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.sent.items()))
    checks.add(
        "identity.requests_joined",
        found.is_one_to_one and found.logged > 0,
        f"{found.logged} requests in the workers' logs; sent: {sent}"
        + "".join(
            f"; {len(ids)} {what} ({ids[0]})"
            for what, ids in (
                ("logged but never sent", found.unknown),
                ("answered but not logged", found.unserved),
                ("logged twice", found.served_twice),
                ("samples answered twice", found.answered_twice),
            )
            if ids
        ),
        **found.sent,
    )
    return found


def check_routing(checks: Checklist, fleet: Fleet, instance_ids: set[int | None]) -> None:
    """Every worker served rollouts; under KV routing the router must have applied the workers' own cache events."""
    checks.add(
        "routing.every_worker_served",
        {worker.instance_id for worker in fleet.workers} <= instance_ids,
        f"{len(instance_ids)} of {len(fleet.workers)} worker(s) served rollouts",
    )
    if not fleet.settings.recipe.has_prefix_cache:
        return
    if fleet.settings.generation.dynamo_cfg.frontend_args.router_mode != "kv":
        return
    stored = count_events(fleet, "stored")
    checks.add(
        "routing.cache_events", stored > 0, f"the router applied {stored:.0f} block-stored events", stored=stored
    )


def cleared_events(fleet: Fleet) -> float:
    """Cache-cleared events the router has applied."""
    return count_events(fleet, "cleared")


def count_events(fleet: Fleet, event_type: str) -> float:
    """Applied KV events of one type (stored, removed, cleared), of all workers, from the frontend's metrics.

    The metric's `worker_id` label is the frontend's own, so events cannot be told apart by worker.
    """
    return sum(
        sample.value
        for family in text_string_to_metric_families(fleet.frontend.metrics())
        for sample in family.samples
        if sample.name.startswith(KV_EVENTS)
        and sample.labels["status"] == "ok"
        and sample.labels["event_type"] == event_type
    )


def await_cleared(fleet: Fleet, before: float) -> bool | None:
    """Whether as many clear events as there are workers reached the router; None when routing does not use events."""
    if fleet.settings.generation.dynamo_cfg.frontend_args.router_mode != "kv":
        return None
    deadline = time.monotonic() + EVENT_PATIENCE_S
    while True:
        if cleared_events(fleet) >= before + len(fleet.workers):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)

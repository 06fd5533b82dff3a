"""Routers compared on one fleet: a frontend for each mode, all for the same workers, used one after the other.

Before every measurement comes an update with the same weights, which clears all caches as updates do between steps.
Modes take turns in an order that moves on from repeat to repeat; a first round of all is not counted.

    python -m functional.suite.compare_routers RECIPE OUT RUN_DIR MODES REPEATS TURNS [key=value …]
"""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from prometheus_client.parser import text_string_to_metric_families

from functional.runtime.errors import ConfigError, RunError
from functional.runtime.fleet.control import FrontendControl
from functional.runtime.recipe.load import load_recipe
from functional.runtime.recipe.model import Recipe, RouterMode
from functional.runtime.rollout.client import RolloutClient
from functional.runtime.rollout.completion import Completion
from functional.suite import driver
from functional.suite.report import write_atomically
from functional.suite.router_findings import Finding, Measurement, find, statement, table
from functional.suite.router_plot import plot
from functional.suite.router_workload import Shape, Workload, converse_all, digest, make_shape
from functional.suite.session import EVENT_DELAY_S, Parts, Session, interrupt

BASELINE = "round-robin"
POLL_INTERVAL_S = 0.25
FIRST_TOKEN = "dynamo_frontend_time_to_first_token_seconds"


class RoutersSession(Session):
    """A run that compares routers instead of training."""

    modes: tuple[str, ...] = ()
    repeats: int = 0
    turns: int = 0

    def _train(self, parts: Parts) -> None:
        self._refit(parts, 0)
        vocabulary = min(len(self.tokenizer), parts.client.limits.vocab_size)
        shape = make_shape(self.recipe, vocabulary, self.turns)
        frontends = self._frontends(parts)
        clients = {mode: parts.new_client(frontend.url) for mode, frontend in frontends.items()}
        measurements = []
        for repeat in range(self.repeats + 1):
            for workload in Workload:
                for order, mode in enumerate(rotated(self.modes, repeat)):
                    one = self._measure(parts, clients[mode], frontends[mode], workload, mode, shape, repeat, order)
                    self.say(f"repeat {repeat}, {workload}, {mode}: {one.throughput:.0f} tokens/s, {one.hit_rate:.3f}")
                    measurements.append(one)
        counted = [one for one in measurements if one.repeat > 0]
        self.checks.add(
            "routers.caches_cleared",
            not any(one.cached_after_update for one in measurements),
            f"{len(measurements)} updates, one before each measurement, each followed by a probe without a cache hit",
        )
        self._check_join(parts)
        self._keep_metrics(parts.fleet)
        write_findings(self.out, self.recipe, shape, counted)

    def _frontends(self, parts: Parts) -> dict[str, FrontendControl]:
        """One for each mode, routed to exactly the fleet's workers."""
        fleet, dynamo = parts.fleet, self.recipe.policy.generation.dynamo_cfg
        own = dynamo.frontend_args
        found: dict[str, FrontendControl] = {}
        if own.router_mode in self.modes:
            found[own.router_mode] = fleet.frontend
        for mode in self.modes:
            if mode not in found:
                arguments = own.model_copy(update={"router_mode": mode})
                found[mode] = fleet.add_frontend(f"frontend-{mode}", arguments)
                self._stack.callback(found[mode].close)
        expected = {worker.instance_id for worker in fleet.workers}
        deadline = time.monotonic() + dynamo.startup_timeout_s
        for mode, frontend in found.items():
            while not (
                set(frontend.instances("generate").values()) == expected
                and frontend.has_model(self.recipe.policy.model_name)
            ):
                fleet.check()
                if time.monotonic() > deadline:
                    raise RunError(f"the frontend for {mode} did not route within dynamo_cfg.startup_timeout_s")
                time.sleep(POLL_INTERVAL_S)
        return found

    def _measure(
        self,
        parts: Parts,
        client: RolloutClient,
        frontend: FrontendControl,
        workload: Workload,
        mode: str,
        shape: Shape,
        repeat: int,
        order: int,
    ) -> Measurement:
        update = parts.refit.update(0)
        if not update.reached:
            raise RunError(
                f"the update before {mode}, repeat {repeat}, was not reached: {update.transitions[-1].reason}"
            )
        time.sleep(EVENT_DELAY_S)  # the clear's events are on their way to the routers
        first_before = first_tokens(frontend)
        began = time.monotonic()
        completions = parts.pool.run(converse_all(client, workload, shape, repeat))
        seconds = time.monotonic() - began
        if problem := next((one.problem for one in completions if one.problem), None):
            raise RunError(f"{mode}, repeat {repeat}: {problem}")
        slots = {worker.instance_id: worker.index for worker in parts.fleet.workers}
        return Measurement(
            workload=workload,
            mode=mode,
            repeat=repeat,
            order=order,
            seconds=seconds,
            requests=len(completions),
            prompt_tokens=sum(len(one.prompt_token_ids) for one in completions),
            cached_tokens=sum(one.cached_tokens for one in completions),
            new_tokens=sum(len(one.token_ids) for one in completions),
            ttft_ms=mean_between(first_before, first_tokens(frontend)) * 1e3,
            latency_ms=[(one.answered_at - one.sent_at) * 1e3 for one in completions],
            by_worker=per_worker(slots, completions, lambda one: 1),
            computed_by_worker=per_worker(
                slots, completions, lambda one: len(one.prompt_token_ids) - one.cached_tokens
            ),
            prompts_sha256=digest(workload, shape, repeat),
            update_s=update.total_s,
            cached_after_update=sum(probe.cached_after for probe in update.probes),
        )


def first_tokens(frontend: FrontendControl) -> tuple[float, float]:
    """Seconds until the first token, summed over all requests of this frontend, and how many these are."""
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(frontend.metrics())
        for sample in family.samples
        if sample.name in (f"{FIRST_TOKEN}_sum", f"{FIRST_TOKEN}_count")
    }
    return found.get(f"{FIRST_TOKEN}_sum", 0.0), found.get(f"{FIRST_TOKEN}_count", 0.0)


def mean_between(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1])


def rotated(modes: Sequence[str], repeat: int) -> list[str]:
    """The modes, begun with another one each repeat."""
    first = repeat % len(modes)
    return [*modes[first:], *modes[:first]]


def per_worker(
    slots: dict[int, int], completions: Sequence[Completion], amount: Callable[[Completion], int]
) -> dict[int, int]:
    """Sums by slot; every worker has one."""
    sums = Counter(dict.fromkeys(slots.values(), 0))
    for one in completions:
        if one.instance_id is not None:
            sums[slots[one.instance_id]] += amount(one)
    return dict(sums)


def write_findings(out: Path, recipe: Recipe, shape: Shape, measurements: Sequence[Measurement]) -> None:
    """Write `out`/routers.json, routers.md and routers.svg."""
    baseline = BASELINE if any(one.mode == BASELINE for one in measurements) else measurements[0].mode
    findings = find(measurements, baseline)
    concurrency = shape.concurrency or shape.conversations
    setting = (
        f"{recipe.num_engines} workers ({recipe.cluster.device}, {recipe.policy.model_name}) and "
        f"{shape.conversations} conversations of {shape.turns} turns, {concurrency} requests in flight at most"
    )
    told = statement(findings, baseline, setting)
    settings = asdict(shape) | {"baseline": baseline, "updates": "one before each measurement, clearing all caches"}
    content = {
        "statement": told,
        "settings": settings,
        "recipe": recipe.shown(),
        "findings": [asdict(finding) for finding in findings],
        "measurements": [asdict(one) for one in measurements],
    }
    write_atomically(out / "routers.json", json.dumps(content, indent=2) + "\n")
    write_atomically(out / "routers.svg", plot(findings))
    write_atomically(out / "routers.md", page(findings, told, settings))
    print(told)


def page(findings: Sequence[Finding], told: str, settings: dict[str, object]) -> str:
    held = "\n".join(f"- {name}: {value}" for name, value in settings.items())
    return (
        f"# Routers compared\n\n{told}\n\n![measurements](routers.svg)\n\n{table(findings)}\n## Held fixed\n\n{held}\n"
    )


def check_words(recipe_path: Path, overrides: list[str], modes: Sequence[str], repeats: int, turns: int) -> None:
    """Raise ConfigError for what cannot be compared, before anything starts."""
    known = [mode for mode in get_args(RouterMode) if mode != "direct"]  # which routes nothing
    if unknown := [mode for mode in modes if mode not in known]:
        raise ConfigError(f"--modes: no router mode {unknown[0]!r}: choose from {', '.join(known)}")
    if len(set(modes)) < 2 or len(set(modes)) < len(modes):
        raise ConfigError(f"--modes={','.join(modes)}: name two different modes or more")
    if repeats < 2 or turns < 1:
        raise ConfigError(f"--repeats={repeats} --turns={turns}: an interval needs 2 repeats, a conversation 1 turn")
    recipe = load_recipe(recipe_path, overrides)
    if recipe.num_engines < 2:
        raise ConfigError(
            "routers differ where there are two workers at least: set "
            "policy.generation.colocated.resources.gpus_per_node=2 and cluster.gpus_per_node=3"
        )
    make_shape(recipe, 1, turns)


def main(arguments: list[str]) -> int:
    """Compare: RECIPE OUT RUN_DIR MODES REPEATS TURNS [key=value …]; 0 when every measurement could be made."""
    recipe, out, run_dir, modes, repeats, turns, *overrides = arguments
    session = RoutersSession
    session.modes, session.repeats, session.turns = tuple(modes.split(",")), int(repeats), int(turns)
    try:
        check_words(Path(recipe), overrides, session.modes, session.repeats, session.turns)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return driver.run(Path(recipe), Path(out), Path(run_dir), overrides, session)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main(sys.argv[1:]))

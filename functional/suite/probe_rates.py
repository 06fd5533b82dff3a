"""How often a probe is right: its rates on a real engine and model, at shifts from below the noise to far above it.

A fleet at its first version gives one token after each of many fixed prompts. The trainer scores them under its own
weights and under copies moved by noise of several sizes. With the moved copy as the other version, each alarm is a
false one; with the moved copy as the new version, the engine computes with the old one, and each probe must tell.
Probes are put together from the rounds seen, drawn at random, and judged as a refit judges them.
"""

import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from functional.runtime.refit.probe import MAX_ROUNDS, PROMPTS, Finding, Noise, Sighting, judge
from functional.runtime.rollout.completion import Completion, Sampling
from functional.suite import driver
from functional.suite.report import ProbeRates
from functional.suite.session import Parts, Session, interrupt
from functional.suite.watching import watched

ROUNDS = 64
SIZES = tuple(0.5 / 2**power for power in range(11))
"""Of the moves, in standard deviations of each tensor."""
PROBES = 10_000
COST_REPEATS = 9


@dataclass(frozen=True)
class Rate:
    """At one size. shift_over_noise: mean |moved − unmoved| over mean |engine − trainer|; the rest are shares of probes
    and mean numbers of tokens."""

    size: float
    shift_over_noise: float
    false_alarms: float
    told_new: float
    caught: float
    tokens_if_new: float
    tokens_if_old: float


class RatesSession(Session):
    """A run that measures its probe instead of training."""

    def _train(self, parts: Parts) -> None:
        self._refit(parts, 0)
        worker = parts.refit.workers[0]
        rounds = [parts.probe(worker, number) for number in range(ROUNDS)]
        flat = [completion for round_ in rounds for completion in round_]
        problems = [completion.problem for completion in flat if completion.problem]
        self.checks.add("probe.tokens_correct", not problems, "; ".join(problems[:3]) or f"{len(flat)} tokens")
        engine = [value for completion in flat for value in completion.logprobs]
        own = watched(parts.fleet, parts.trainer.weights.remote("score", 0, flat)).current
        rates = []
        for seed, size in enumerate(SIZES):
            moved = watched(parts.fleet, parts.trainer.score_nudged.remote(flat, size, seed))
            rates.append(measure(size, engine, own, moved))
            self.say(describe(rates[-1]))
        noise = statistics.fmean(abs(a - b) for a, b in zip(engine, own, strict=True))
        seconds = self._cost(parts)
        self.report.probe_rates = ProbeRates(
            parameters=self.report.parameters,
            noise=noise,
            tokens=len(flat),
            seconds=seconds,
            rates=[asdict(rate) for rate in rates],
        )
        false_alarms = max(rate.false_alarms for rate in rates)
        self.checks.add("probe.false_alarms", false_alarms <= 0.001, f"at most {false_alarms:.5f} of {PROBES} probes")
        told = [rate for rate in rates if rate.shift_over_noise >= 4]
        caught = min((rate.caught for rate in told), default=0.0)
        self.checks.add(
            "probe.old_weights_caught",
            caught >= 0.99,
            f"at least {caught:.4f} of {PROBES} probes at {len(told)} shifts from 4× the noise ({noise:.5f} nats)",
        )
        self.say(f"seconds: {seconds}")

    def _cost(self, parts: Parts) -> dict[str, float]:
        """Median seconds of a round, and of as many tokens after one prompt, taken in turns with caches cleared."""
        worker, one = parts.refit.workers[0], parts.overlap_prompt
        sampling = Sampling(PROMPTS, parts.sampling.temperature, ignore_eos=True)

        def ask_one() -> list[Completion]:
            return parts.pool.run(parts.prober.complete_on(worker.instance_id, [one], sampling))

        ways = {"one token after each prompt": lambda: parts.probe(worker, 0), "all after one": ask_one}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for way, ask in [*ways.items()] * COST_REPEATS:
            worker.control.call("flush_cache")
            began = time.monotonic()
            ask()
            seconds[way].append(time.monotonic() - began)
        return {way: statistics.median(taken) for way, taken in seconds.items()}


def measure(size: float, engine: Sequence[float], own: Sequence[float], moved: Sequence[float]) -> Rate:
    """Rates of `PROBES` probes drawn from the tokens' log-probs: the engine's, the trainer's with the weights that the
    engine has, and with moved ones."""
    noise = Noise()
    noise.learn(Sighting(a, b, None) for a, b in zip(engine, own, strict=True))
    distance = statistics.fmean(abs(a - b) for a, b in zip(engine, own, strict=True))
    shift = statistics.fmean(abs(a - b) for a, b in zip(own, moved, strict=True))
    new = probe_all([Sighting(*values) for values in zip(engine, own, moved, strict=True)], noise)
    old = probe_all([Sighting(*values) for values in zip(engine, moved, own, strict=True)], noise)
    return Rate(
        size=size,
        shift_over_noise=shift / distance,
        false_alarms=share(new, Finding.OTHER),
        told_new=share(new, Finding.NEW),
        caught=share(old, Finding.OTHER),
        tokens_if_new=statistics.fmean(tokens for _, tokens in new),
        tokens_if_old=statistics.fmean(tokens for _, tokens in old),
    )


def probe_all(sightings: Sequence[Sighting], noise: Noise) -> list[tuple[Finding, int]]:
    rng = random.Random(0)
    rounds = [sightings[start : start + PROMPTS] for start in range(0, len(sightings), PROMPTS)]
    found = []
    for _ in range(PROBES):
        drawn = rng.sample(rounds, MAX_ROUNDS)
        reading, _ = judge(drawn[0], drawn.__getitem__, noise, workers=1)
        found.append((reading.finding, reading.tokens))
    return found


def share(found: Sequence[tuple[Finding, int]], finding: Finding) -> float:
    return sum(one is finding for one, _ in found) / len(found)


def describe(rate: Rate) -> str:
    return (
        f"shift {rate.shift_over_noise:7.2f}× the noise: false alarms {rate.false_alarms:.5f}, told new "
        f"{rate.told_new:.3f}, old weights caught {rate.caught:.4f}; {rate.tokens_if_new:.1f} and "
        f"{rate.tokens_if_old:.1f} tokens"
    )


def main(arguments: list[str]) -> int:
    """Measure: RECIPE OUT RUN_DIR [key=value …]; 0 when the rates are what docs/refit.md promises."""
    recipe, out, run_dir, *overrides = arguments
    return driver.run(Path(recipe), Path(out), Path(run_dir), overrides, RatesSession)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main(sys.argv[1:]))

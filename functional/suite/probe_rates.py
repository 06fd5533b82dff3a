"""How often a probe is right: its rates on a real engine and model, at shifts from below the noise to far above it.

A fleet at its first version gives the log-probs of many fixed prompts' tokens. The trainer scores them under its own
weights and under copies moved by noise of several sizes. With the moved copy as the other version, each alarm is a
false one; with the moved copy as the new version, the engine computes with the old one, and each probe must tell.
Probes are put together from the rounds seen, drawn at random, and judged as a refit judges them.
"""

import itertools
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from functional.runtime.refit.probe import MAX_ROUNDS, Finding, Noise, Sighting, judge
from functional.runtime.rollout.completion import Sampling
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
        worker.control.call("flush_cache")  # what the update's own probe left there has no log-probs
        rounds = [parts.probe(worker, number) for number in range(ROUNDS)]
        problems = [completion.problem for completion in rounds if completion.problem]
        self.checks.add("probe.tokens_correct", not problems, "; ".join(problems[:3]) or f"{len(rounds)} prompts")
        engine = [list(completion.prompt_logprobs) for completion in rounds]
        prompts = [completion.prompt_token_ids for completion in rounds]
        own = [watched(parts.fleet, parts.trainer.weights.remote("score", 0, prompt)).current for prompt in prompts]
        rates = []
        for seed, size in enumerate(SIZES):
            moved = watched(parts.fleet, parts.trainer.score_nudged.remote(prompts, size, seed))
            rates.append(measure(size, engine, own, moved))
            self.say(describe(rates[-1]))
        noise = mean_distance(engine, own)
        seconds = self._cost(parts)
        self.report.probe_rates = ProbeRates(
            parameters=self.report.parameters,
            noise=noise,
            tokens=sum(map(len, engine)),
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
        """Median seconds of a round, and of as many tokens, one sampled after each of as many prompts or all after one;
        the ways take turns, with caches cleared."""
        worker = parts.refit.workers[0]
        worker.control.call("flush_cache")  # a prompt that is cached has no log-probs
        first = parts.probe(worker, 0)
        prompt, tokens = first.prompt_token_ids, len(first.prompt_logprobs)
        rng = random.Random(0)
        prompts = [rng.sample(prompt, len(prompt)) for _ in range(tokens)]

        def sample(prompts: Sequence[Sequence[int]], count: int) -> None:
            parts.pool.run(parts.prober.complete_on(worker.instance_id, prompts, Sampling(count, ignore_eos=True)))

        ways: dict[str, Callable[[], object]] = {
            "the prompt's tokens": lambda: parts.probe(worker, 0),
            "one token after each of as many prompts": lambda: sample(prompts, 1),
            "all after one prompt": lambda: sample([prompt[: len(prompt) // 2]], tokens // 2),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for way, ask in [*ways.items()] * COST_REPEATS:
            worker.control.call("flush_cache")
            began = time.monotonic()
            ask()
            seconds[way].append(time.monotonic() - began)
        return {way: statistics.median(taken) for way, taken in seconds.items()}


def measure(
    size: float, engine: Sequence[Sequence[float]], own: Sequence[Sequence[float]], moved: Sequence[Sequence[float]]
) -> Rate:
    """Rates of `PROBES` probes drawn from the rounds' log-probs: the engine's, the trainer's with the weights that the
    engine has, and with moved ones."""
    noise = Noise()
    noise.learn(itertools.chain.from_iterable(sight(engine, own, None)))
    shift = mean_distance(own, moved)
    new = probe_all(sight(engine, own, moved), noise)
    old = probe_all(sight(engine, moved, own), noise)
    return Rate(
        size=size,
        shift_over_noise=shift / mean_distance(engine, own),
        false_alarms=share(new, Finding.OTHER),
        told_new=share(new, Finding.NEW),
        caught=share(old, Finding.OTHER),
        tokens_if_new=statistics.fmean(tokens for _, tokens in new),
        tokens_if_old=statistics.fmean(tokens for _, tokens in old),
    )


def sight(
    engine: Sequence[Sequence[float]], new: Sequence[Sequence[float]], other: Sequence[Sequence[float]] | None
) -> list[list[Sighting]]:
    """Each round's tokens."""
    others: Sequence[Sequence[float | None]] = other or [[None] * len(one) for one in new]
    return [
        [Sighting(*values) for values in zip(*columns, strict=True)]
        for columns in zip(engine, new, others, strict=True)
    ]


def mean_distance(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    """Over all tokens of all rounds, nats."""
    flat = zip(itertools.chain.from_iterable(a), itertools.chain.from_iterable(b), strict=True)
    return statistics.fmean(abs(x - y) for x, y in flat)


def probe_all(rounds: Sequence[list[Sighting]], noise: Noise) -> list[tuple[Finding, int]]:
    rng = random.Random(0)
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

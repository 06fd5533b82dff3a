"""Whether a recipe learns: its reward's slope over several seeds, and the same with updates withheld from the engines.

    python -m functional.suite.learning RECIPE OUT [key=value …]

A run for each seed and arm, one after the other, into OUT/trained-SEED and OUT/withheld-SEED; learning.json and
learning.svg. With `faults.withhold_updates` the trainer takes its steps, and the engines keep the first weights: a
slope that remains comes from something else than updates. Exit status 1 unless the interval of the trained slope lies
above 0, and that of the withheld one within TOLERANCE of it, either way.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from functional.runtime.errors import RunError
from functional.suite.pages.plots import Series, lines
from functional.suite.report import write_atomically
from functional.suite.router_findings import Interval, interval

SEEDS = (42, 43, 44)
CONFIDENCE = 0.95
TOLERANCE = 0.2
RUN_S = 1800.0
ARMS = {"trained": (), "withheld": ("faults.withhold_updates=true",)}
STYLE = (
    "<style>.grid{stroke:#cbd5e0;fill:none}.axis{stroke:#4a5568;fill:none}.line{fill:none;stroke-width:2}"
    "text{font:12px sans-serif}.s0,.s1,.s2{stroke:#2b6cb0}.s3,.s4,.s5{stroke:#dd6b20}"
    ".f0,.f1,.f2{fill:#2b6cb0}.f3,.f4,.f5{fill:#dd6b20}</style>"
)


@dataclass(frozen=True)
class Learning:
    """slopes: reward a step, a seed each; the intervals are of their means over the seeds."""

    rewards: dict[str, dict[int, list[float]]]
    slopes: dict[str, list[float]]
    trained: Interval
    withheld: Interval
    learns: bool
    stays: bool


def judge(rewards: dict[str, dict[int, list[float]]]) -> Learning:
    """rewards: by arm and seed, step after step. A seed is one repeat: steps of a run depend on each other."""
    slopes = {arm: [slope(values) for values in runs.values()] for arm, runs in rewards.items()}
    trained, withheld = (interval(slopes[arm], CONFIDENCE) for arm in ARMS)
    within = TOLERANCE * trained.mean
    return Learning(
        rewards, slopes, trained, withheld, trained.low > 0, -within <= withheld.low and withheld.high <= within
    )


def slope(values: Sequence[float]) -> float:
    """Of the least-squares line through values at 1, 2, …"""
    middle, mean = (len(values) + 1) / 2, sum(values) / len(values)
    places = [place - middle for place in range(1, len(values) + 1)]
    return sum(x * (y - mean) for x, y in zip(places, values, strict=True)) / sum(x * x for x in places)


def measure(recipe: Path, out: Path, overrides: Sequence[str]) -> Learning:
    """Run every seed and arm. Raises RunError where a run did not come to its end."""
    rewards: dict[str, dict[int, list[float]]] = {arm: {} for arm in ARMS}
    for seed in SEEDS:
        for arm, own in ARMS.items():
            rewards[arm][seed] = take(recipe, out / f"{arm}-{seed}", [*overrides, *own, f"grpo.seed={seed}"])
            print(f"{arm}, seed {seed}: {rewards[arm][seed][0]:.3f} to {rewards[arm][seed][-1]:.3f}", flush=True)
    return judge(rewards)


def take(recipe: Path, out: Path, overrides: Sequence[str]) -> list[float]:
    """One run; its mean reward by step. Its checks are judged by whoever reads its report: with updates withheld the
    agreement of engine and trainer must fail."""
    command = [sys.executable, "-m", "functional.suite.cli", "run", str(recipe), *overrides, "--out", str(out)]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "run.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=log, timeout=RUN_S, check=False)
    if not (out / "report.json").exists():
        raise RunError(f"{out}: the run made no report, see run.log")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    if report["error"] is not None:
        raise RunError(f"{out}: {report['error']}")
    return [step["mean_reward"] for step in report["steps"]]


def plot(found: Learning) -> str:
    """The reward of every run: trained in one colour, withheld in another."""
    series = [
        Series(f"{arm} {seed}", [(float(step), value) for step, value in enumerate(values, 1)])
        for arm, runs in found.rewards.items()
        for seed, values in runs.items()
    ]
    drawn = lines("Reward", describe(found), series, "step", "mean reward")
    assert drawn is not None
    opening, _, rest = drawn.svg.partition(">")
    return opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ') + ">" + STYLE + rest + "\n"


def describe(found: Learning) -> str:
    """One line."""

    def shown(one: Interval) -> str:
        return f"{one.mean:+.5f} a step ({one.low:+.5f} to {one.high:+.5f})"

    within = f"within ±{TOLERANCE * found.trained.mean:.5f}"
    return f"trained {shown(found.trained)}; updates withheld {shown(found.withheld)}, wanted {within}"


def main(recipe: Path, out: Path, overrides: Sequence[str]) -> int:
    found = measure(recipe, out, overrides)
    write_atomically(out / "learning.json", json.dumps(asdict(found), indent=2) + "\n")
    write_atomically(out / "learning.svg", plot(found))
    print(describe(found))
    return 0 if found.learns and found.stays else 1


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
    except RunError as error:
        sys.exit(f"error: {error}")

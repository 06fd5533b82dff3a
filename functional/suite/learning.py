"""Whether a recipe learns: its reward's slope over several seeds, and the same with updates withheld from the engines.

One fleet. Each seed has two courses of `grpo.max_num_steps` steps, from the first weights, a fresh optimizer and the
seed's own prompts: in one the fleet has an update after each step, in the other it keeps the first weights whatever the
trainer learns. A slope that remains there comes from something else than updates.
"""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.rules import ASYNC, TOOL_DATA, Problem
from functional.suite import checks, driver
from functional.suite.batch import score
from functional.suite.pages.plots import Series, lines
from functional.suite.report import write_atomically
from functional.suite.router_findings import Interval, interval
from functional.suite.session import Parts, Session, interrupt
from functional.suite.step_figures import as_step
from functional.suite.tasks import Task, make_task
from functional.suite.watching import watched

SEEDS = 3
CONFIDENCE = 0.95
TOLERANCE = 0.2
ARMS = ("trained", "withheld")
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


class LearningSession(Session):
    """A run of several courses instead of one."""

    _version = 0

    @classmethod
    def find_misfits(cls, recipe: Recipe) -> list[Problem]:
        grpo, name = recipe.grpo, recipe.data.dataset_name
        misfits = []
        if grpo.async_grpo.enabled:
            message = "courses generate and train in turn, the same with updates and without: set it to false"
            misfits.append(Problem(f"{ASYNC}.enabled", True, message))
        if grpo.max_num_steps < 2:
            misfits.append(Problem("grpo.max_num_steps", grpo.max_num_steps, "a slope needs 2 steps at least"))
        if name == TOOL_DATA:
            misfits.append(Problem("data.dataset_name", name, "conversations have no courses here: take another"))
        return misfits

    def _train(self, parts: Parts) -> None:
        self._refit(parts, 0)
        rewards: dict[str, dict[int, list[float]]] = {arm: {} for arm in ARMS}
        first = self.recipe.grpo.seed
        for seed in range(first, first + SEEDS):
            for arm in ARMS:
                rewards[arm][seed] = self._course(parts, seed, arm)
        found = judge(rewards)
        write_atomically(self.out / "learning.json", json.dumps(asdict(found), indent=2) + "\n")
        write_atomically(self.out / "learning.svg", plot(found))
        self.say(describe(found))
        self.checks.add("learning.reward_rises", found.learns, describe(found))
        self.checks.add("learning.flat_without_updates", found.stays, describe(found))

    def _course(self, parts: Parts, seed: int, arm: str) -> list[float]:
        """Mean reward by step."""
        name, metrics = f"{arm}{seed}", dict[str, float]()
        rewards: list[float] = []
        self._version += 1
        watched(parts.fleet, parts.trainer.start_over.remote(self._version))
        self._refit(parts, self._version, f"{name}.start")
        task = self._task_of(seed)
        for step in range(1, self.recipe.grpo.max_num_steps + 1):
            self._version += 1
            metrics = self._learn(parts, task, step, f"{name}.step{step}")
            rewards.append(self.report.steps[-1].mean_reward or 0.0)
            if arm == "trained":
                checks.check_agreement(self.checks, f"{name}.step{step}", metrics, self.recipe.checks)
                self._refit(parts, self._version, f"{name}.refit{step}")
        if arm == "withheld":
            apart = metrics["token_mult_prob_error"] > metrics["token_mult_prob_error_bound"]
            detail = f"engine and trainer are {metrics['logp_noise']:.3f} nats apart after {len(rewards)} steps"
            self.checks.add(f"{name}.noticed", apart, detail)
        return rewards

    def _learn(self, parts: Parts, task: Task, step: int, name: str) -> dict[str, float]:
        """Rollouts and an optimizer step."""
        grpo, prompts = self.recipe.grpo, task.prompts(step)
        kept = parts.trainer.keep.remote()
        flat = [prompt.token_ids for prompt in prompts for _ in range(grpo.num_generations_per_prompt)]
        batch = score(prompts, self._generate(parts, parts.spread, flat, self._version), task, grpo)
        checks.check_rollouts(self.checks, name, batch, parts.instances, self.recipe.checks)
        watched(parts.fleet, kept)
        metrics: dict[str, float] = watched(parts.fleet, parts.trainer.train.remote(batch.samples(), self._version))
        self.report.steps.append(as_step(self._version, batch, metrics))
        self.say(f"{name}: reward {batch.mean_reward:.3f}, {checks.describe_step(metrics)}")
        return metrics

    def _task_of(self, seed: int) -> Task:
        data, grpo = self.recipe.data, self.recipe.grpo
        held = data.split_validation_size
        return make_task(data.dataset_name, self.tokenizer, grpo.num_prompts_per_step, seed, data.keys, held)


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


def main(arguments: list[str]) -> int:
    """Measure: RECIPE OUT RUN_DIR [key=value …]; 0 when the reward rises with updates, and not without."""
    recipe, out, run_dir, *overrides = arguments
    return driver.run(Path(recipe), Path(out), Path(run_dir), overrides, LearningSession)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main(sys.argv[1:]))

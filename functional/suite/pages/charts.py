"""Which plots a run has: where its time went, what was learnt, how engine and trainer agree, what served and what it
took."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from functional.suite.pages.plots import Bar, Plot, Series, bars, lines, number, scatter
from functional.suite.pages.run_files import RunFiles, served_by_step
from functional.suite.report import Report, Step

CACHE = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
GIB = 2.0**30


def charts(report: Report, files: RunFiles) -> list[Plot]:
    """Those for which the run has numbers, in the order of the page."""
    drawn = (
        _bring_up(report),
        _steps(report, files),
        _beside(report),
        _ages(report),
        _rewards(report),
        _agreement(report),
        _pairs(files),
        _noise(report),
        _refits(report),
        _requests(report, files),
        _cache(files),
        _processors(files),
        _memory(files),
        *_gpus(files),
    )
    return [plot for plot in drawn if plot is not None]


def _bring_up(report: Report) -> Plot | None:
    rows, at = [], 0.0
    for name, seconds in report.phases.items():
        rows.append(Bar(name, [(name, seconds)], at))
        at += seconds
    about = f"The parts of start-up one after the other, {number(at)} s together."
    return bars("Bring-up", about, [Bar(row.name, [("seconds", row.parts[0][1])], row.start) for row in rows], "s")


def _steps(report: Report, files: RunFiles) -> Plot | None:
    """Per step: generation up to the last answer, training up to the update, the update."""
    rows = []
    ended = _last_answers(files)
    totals = {refit.asked: refit.total_s for refit in report.refits}
    for step in (one.step for one in report.steps):
        began = files.event(f"step {step}: generating")
        if began is None:
            continue
        answered = max((time for time in ended.get(step, ()) if time >= began), default=None)
        update = files.event(f"refit {step}: warm probe", began)
        parts = [("generate", answered - began)] if answered is not None else []
        if answered is not None and update is not None:
            name = "train" if report.asynchronous is None else "wait and train"
            parts.append((name, max(update - answered, 0.0)))
        parts += [("update", totals[step])] if step in totals else []
        rows.append(Bar(f"step {step}", parts))
    return bars("Time of a step", "Generation, training and policy update of each step.", rows, "s")


def _beside(report: Report) -> Plot | None:
    """Of a run that generates while it trains."""
    found = report.asynchronous
    if found is None:
        return None
    rows = [
        Bar(
            "trainer",
            [("alone", found.training_s - found.both_s), ("both", found.both_s), ("idle", found.trainer_idle_s)],
        ),
        Bar(
            "engines",
            [("alone", found.generating_s - found.both_s), ("both", found.both_s), ("idle", found.engines_idle_s)],
        ),
    ]
    about = (
        f"From the first rollout to the last update, {number(found.seconds)} s. The trainer waited "
        f"{number(found.trainer_waited_s)} s for samples, or for rollouts to end before an update."
    )
    return bars("Generation beside training", about, rows, "s")


def _ages(report: Report) -> Plot | None:
    found = report.asynchronous
    if found is None:
        return None
    rows = [Bar(f"age {age}", [("samples", float(count))]) for age, count in sorted(found.ages.items())]
    about = f"How many policy versions samples were behind the trainer that learned from them; at most {found.bound}."
    return bars("Age of samples", about, rows, "samples")


def _last_answers(files: RunFiles) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in files.rollouts:
        found.setdefault(row["step"], []).append(row["answered_at"])
    return found


def _rewards(report: Report) -> Plot | None:
    points = [(float(one.step), one.mean_reward) for one in report.steps if one.mean_reward is not None]
    return lines("Reward", "Mean reward over the samples of a step.", [Series("reward", points)], "step", "mean reward")


def _agreement(report: Report) -> Plot | None:
    series = [
        Series("token_mult_prob_error", _metric(report.steps, "token_mult_prob_error")),
        Series("at most", _metric(report.steps, "token_mult_prob_error_bound")),
    ]
    about = "Mean of exp |trainer − engine| over the tokens of a step; 1 is equality. «at most»: what rounding allows."
    return lines("token_mult_prob_error", about, series, "step", "ratio")


def _pairs(files: RunFiles) -> Plot | None:
    series = [
        Series(f"step {row['step']}", list(zip(row["engine"], row["trainer"], strict=True)))
        for row in (files.agreement[:1] + files.agreement[1:][-3:])
    ]
    about = "Log-probs of the same tokens, before the step; the broken line is equality. The first and the last steps."
    return scatter("Trainer against engine", about, series, "engine, nats", "trainer, nats")


def _noise(report: Report) -> Plot | None:
    series = [
        Series("noise", _metric(report.steps, "logp_noise")),
        Series("noise, at most", _metric(report.steps, "logp_noise_bound")),
        Series("shift by the step", _metric(report.steps, "logp_shift")),
    ]
    about = (
        "Mean |trainer − engine| before a step, what rounding allows it to be, and how far the step moves the policy."
    )
    return lines("Log-probs: noise and shift", about, series, "step", "nats a token")


def _refits(report: Report) -> Plot | None:
    rows = [Bar(f"update {refit.asked}", list(refit.phases.items())) for refit in report.refits]
    return bars("Policy updates by phase", "Where the time of each update went, last attempt.", rows, "s")


def _requests(report: Report, files: RunFiles) -> Plot | None:
    """By worker, over all steps; an instance that is no worker's any more was lost and replaced."""
    total: Counter[int] = Counter()
    for served in served_by_step(files.rollouts).values():
        total.update(served)
    names = {
        instance: f"worker {slot}" for slot, instance in (report.topology.workers if report.topology else {}).items()
    }
    for refit in report.refits:
        names |= {new.new_instance: f"worker {new.worker}, new" for new in refit.replaced}
    rows = [Bar(names.get(instance, str(instance)), [("samples", float(n))]) for instance, n in total.most_common()]
    return bars("Samples by worker", "How many samples of the run each worker made.", rows, "samples")


def _cache(files: RunFiles) -> Plot | None:
    """Between two polls: prompt tokens found in the prefix cache, of those looked up."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in files.metrics:
        for name, value in row.items():
            if name.endswith(CACHE[0]):
                worker, asked = name.split("/")[1], row.get(name.replace(*CACHE))
                if asked is not None:
                    found.setdefault(worker, []).append((row["time"] - files.began, value, asked))
    series = []
    for worker, polls in found.items():
        points = []
        for (_, hits0, asked0), (at, hits1, asked1) in pairwise([(0.0, 0.0, 0.0), *polls]):
            if asked1 > asked0:
                points.append((at, 100 * max(hits1 - hits0, 0.0) / (asked1 - asked0)))
        series.append(Series(worker, points))
    about = "Share of prompt tokens found in each engine's prefix cache since the poll before."
    return lines("Prefix cache hits", about, series, "seconds since start", "percent")


def _processors(files: RunFiles) -> Plot | None:
    about = "Processors that each part of the run keeps busy, on the driver's machine."
    return lines("Processor use", about, _parts(files, 0, 1.0), "seconds since start", "processors")


def _memory(files: RunFiles) -> Plot | None:
    about = "Resident memory by part, on the driver's machine; memory that processes share counts in each."
    return lines("Memory use", about, _parts(files, 1, GIB), "seconds since start", "GiB")


def _parts(files: RunFiles, column: int, unit: float) -> list[Series]:
    names = dict.fromkeys(name for row in files.usage for name in row["parts"])
    return [
        Series(
            name,
            [
                (row["time"] - files.began, row["parts"][name][column] / unit)
                for row in files.usage
                if name in row["parts"]
            ],
        )
        for name in names
    ]


def _gpus(files: RunFiles) -> Iterator[Plot | None]:
    count = max((len(row["gpus"]) for row in files.usage), default=0)
    for column, title, unit, divisor in ((0, "GPU use", "percent", 1.0), (1, "GPU memory", "GiB", GIB)):
        series = [
            Series(
                f"GPU {index}",
                [
                    (row["time"] - files.began, row["gpus"][index][column] / divisor)
                    for row in files.usage
                    if index < len(row["gpus"])
                ],
            )
            for index in range(count)
        ]
        yield lines(
            title,
            f"{title} as nvidia-smi tells it, of every GPU of the driver's machine.",
            series,
            "seconds since start",
            unit,
        )


def _metric(steps: list[Step], name: str) -> list[tuple[float, float]]:
    found = ((one.step, (one.model_extra or {}).get(name)) for one in steps)
    return [(float(step), value) for step, value in found if value is not None]

"""What measurements of routers show: means with intervals, paired differences, a table, and one statement.

Repeats are independent; within a repeat every mode gets the same prompts, so modes are compared by the differences
within repeats. Intervals are Student's t. Those of the differences hold all together with the confidence named
(Bonferroni), so that with many of them none stands out by chance.
"""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Measurement:
    """One mode under one workload, once, right after an update. Tokens are counted over all requests.

    order: its place among the modes of the repeat; seconds: of the conversations; ttft_ms: mean until the first token,
    by the frontend's histogram; latency_ms: of each request, by the client's clock; by_worker, computed_by_worker:
    requests and prompt tokens not found in a cache, by slot; prompts_sha256: of the first turn's prompts;
    cached_after_update: cached tokens that a probe found after the update.
    """

    workload: str
    mode: str
    repeat: int
    order: int
    seconds: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_ms: float
    latency_ms: list[float]
    by_worker: dict[int, int]
    computed_by_worker: dict[int, int]
    prompts_sha256: str
    update_s: float
    cached_after_update: int

    @property
    def throughput(self) -> float:
        return self.new_tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def late(self) -> float:
        """The latency that 95% of the requests keep below."""
        return statistics.quantiles(self.latency_ms, n=20, method="inclusive")[-1]

    @property
    def imbalance(self) -> float:
        """Requests of the busiest worker over the mean of all: 1 where each has as many."""
        return max(self.by_worker.values()) / statistics.fmean(self.by_worker.values())


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    of: Callable[[Measurement], float]
    digits: int


METRICS = (
    Metric("throughput", "generated tokens/s", lambda one: one.throughput, 0),
    Metric("time to first token, mean", "ms", lambda one: one.ttft_ms, 1),
    Metric("latency of a request, 95th percentile", "ms", lambda one: one.late, 1),
    Metric("cache hit rate", "share of prompt tokens", lambda one: one.hit_rate, 3),
    Metric("imbalance", "requests of the busiest worker / mean", lambda one: one.imbalance, 2),
)


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float

    @property
    def tells(self) -> bool:
        """Whether 0 lies outside."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Finding:
    """One metric of one mode under one workload. difference: to the baseline, None for the baseline itself."""

    workload: str
    mode: str
    metric: str
    values: list[float]
    interval: Interval
    difference: Interval | None


def find(measurements: Sequence[Measurement], baseline: str) -> list[Finding]:
    """Every metric of every mode under every workload; two repeats at least."""
    workloads = list(dict.fromkeys(one.workload for one in measurements))
    modes = list(dict.fromkeys(one.mode for one in measurements))
    comparisons = len(workloads) * len(METRICS) * (len(modes) - 1)
    together = 1 - (1 - CONFIDENCE) / max(comparisons, 1)
    found = []
    for workload in workloads:
        for metric in METRICS:
            by_mode = {mode: _values(measurements, workload, mode, metric) for mode in modes}
            for mode, values in by_mode.items():
                apart = [mine - other for mine, other in zip(values, by_mode[baseline], strict=True)]
                difference = None if mode == baseline else interval(apart, together)
                found.append(Finding(workload, mode, metric.name, values, interval(values, CONFIDENCE), difference))
    return found


def _values(measurements: Sequence[Measurement], workload: str, mode: str, metric: Metric) -> list[float]:
    chosen = [one for one in measurements if (one.workload, one.mode) == (workload, mode)]
    return [metric.of(one) for one in sorted(chosen, key=lambda one: one.repeat)]


def interval(values: Sequence[float], confidence: float) -> Interval:
    """Of the mean, by Student's t; two values at least."""
    mean = statistics.fmean(values)
    reach = t_quantile((1 + confidence) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - reach, mean + reach)


@functools.cache
def t_quantile(probability: float, freedom: int) -> float:
    """Student's t for a probability above 0.5, by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return high


def _t_below(t: float, freedom: int) -> float:
    """P(T < t) for t ≥ 0: with t = √freedom·tan θ the density is a power of cos θ, which Simpson's rule integrates."""
    steps = 2000
    width = math.atan(t / math.sqrt(freedom)) / steps
    heights = [math.cos(index * width) ** (freedom - 1) for index in range(steps + 1)]
    area = width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    return 0.5 + math.exp(log_scale) * area


def table(findings: Sequence[Finding]) -> str:
    """Markdown: a row a metric and mode, for each workload."""
    lines = []
    for workload in dict.fromkeys(finding.workload for finding in findings):
        lines += [f"## Workload: {workload}", ""]
        lines += ["| metric | mode | mean | 95% interval | difference to the baseline |", "|---|---|---|---|---|"]
        for finding in (one for one in findings if one.workload == workload):
            metric = metric_named(finding.metric)
            mean, low, high = (f"{value:.{metric.digits}f}" for value in _numbers(finding.interval))
            apart = "baseline" if finding.difference is None else describe(finding.difference, metric.digits)
            lines.append(f"| {metric.name}, {metric.unit} | {finding.mode} | {mean} | {low} to {high} | {apart} |")
        lines.append("")
    return "\n".join(lines)


def describe(difference: Interval, digits: int) -> str:
    mean, low, high = (f"{value:+.{digits}f}" for value in _numbers(difference))
    return f"{mean} ({low} to {high})" + ("" if difference.tells else ", none told")


def statement(findings: Sequence[Finding], baseline: str, setting: str) -> str:
    """What the differences tell, and for what. setting: the fleet and the load, in a few words."""
    repeats = len(findings[0].values)
    parts = []
    for workload in dict.fromkeys(finding.workload for finding in findings):
        for mode in dict.fromkeys(finding.mode for finding in findings if finding.mode != baseline):
            chosen = [one for one in findings if (one.workload, one.mode) == (workload, mode)]
            parts.append(f"with {workload}, {mode} against {baseline}: {_told(chosen)}")
    return (
        f"On {setting}, over {repeats} repeats: {'; '.join(parts)}. The intervals hold together with "
        f"{CONFIDENCE:.0%} confidence; other models, fleets and loads were not measured."
    )


def _told(findings: Sequence[Finding]) -> str:
    told, untold = [], []
    for finding in findings:
        metric = metric_named(finding.metric)
        if finding.difference is not None and finding.difference.tells:
            _, low, high = (f"{value:+.{metric.digits}f}" for value in _numbers(finding.difference))
            told.append(f"{metric.name} differs by {low} to {high} {metric.unit}")
        else:
            untold.append(metric.name)
    return ", ".join(told + ([f"no difference was told in {', '.join(untold)}"] if untold else []))


def metric_named(name: str) -> Metric:
    return next(metric for metric in METRICS if metric.name == name)


def _numbers(of: Interval) -> tuple[float, float, float]:
    return of.mean, of.low, of.high

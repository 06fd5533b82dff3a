"""A plot of a comparison of routers: a row a metric, a column a workload; a dot a repeat, a bar the mean's interval."""

from collections.abc import Sequence

from functional.suite.router_findings import METRICS, Finding, Metric

LEFT, WIDTH, TOP, LINE, GAP = 170, 330, 46, 22, 44
COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#b83280", "#4a5568")


def plot(findings: Sequence[Finding]) -> str:
    """SVG."""
    workloads = list(dict.fromkeys(finding.workload for finding in findings))
    modes = list(dict.fromkeys(finding.mode for finding in findings))
    panel = LINE * len(modes) + GAP
    width, height = LEFT + (WIDTH + 40) * len(workloads), TOP + panel * len(METRICS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, workload in enumerate(workloads):
        x = LEFT + column * (WIDTH + 40)
        parts.append(f'<text x="{x}" y="18" font-size="14" font-weight="bold">{workload}</text>')
        for row, metric in enumerate(METRICS):
            chosen = [one for one in findings if (one.workload, one.metric) == (workload, metric.name)]
            parts += _panel(chosen, metric, x, TOP + row * panel)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(findings: Sequence[Finding], metric: Metric, x: int, top: int) -> list[str]:
    """One metric under one workload, on an axis from 0."""
    longest = max(max(finding.interval.high, *finding.values) for finding in findings) or 1.0

    def place(value: float) -> str:
        return f"{x + max(value, 0.0) / longest * WIDTH:.1f}"

    parts = [f'<text x="{x}" y="{top}">{metric.name}, {metric.unit}</text>']
    bottom = top + 8 + LINE * len(findings)
    parts.append(f'<path d="M{x} {top + 6}V{bottom}H{x + WIDTH}" stroke="#a0aec0" fill="none"/>')
    parts.append(f'<text x="{x}" y="{bottom + 13}" fill="#4a5568" font-size="10">0</text>')
    parts.append(
        f'<text x="{x + WIDTH}" y="{bottom + 13}" fill="#4a5568" font-size="10" text-anchor="end">'
        f"{longest:.{metric.digits}f}</text>"
    )
    for line, finding in enumerate(findings):
        y, colour = top + 8 + LINE * line + LINE // 2, COLOURS[line % len(COLOURS)]
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end" fill="{colour}">{finding.mode}</text>')
        parts.append(
            f'<path d="M{place(finding.interval.low)} {y}H{place(finding.interval.high)}" stroke="{colour}" '
            'stroke-width="5" stroke-opacity="0.4"/>'
        )
        parts += [f'<circle cx="{place(value)}" cy="{y}" r="2.5" fill="{colour}"/>' for value in finding.values]
        mean = place(finding.interval.mean)
        parts.append(f'<path d="M{mean} {y - 7}V{y + 7}" stroke="{colour}" stroke-width="2"/>')
    return parts

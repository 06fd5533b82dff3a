"""Plots as inline SVG. Colours are classes that the page's style sheet gives a light and a dark value.

Every plot has a title and a description for screen readers, and its numbers as rows for a table beside it, so that
neither colour nor sight is needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, PLOT_HEIGHT, LEFT, RIGHT, TOP = 460, 190, 56, 12, 10
BAR, GAP, LABEL = 18, 8, 118
MOST_POINTS = 400
MOST_ROWS = 24
MOST_TABLE_ROWS = 60
COLOURS = 8
DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Series:
    """Points (x, y) under a name, in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """A row: lengths by name, end to end. `start`: where the first begins."""

    name: str
    parts: Sequence[tuple[str, float]]
    start: float = 0.0


@dataclass(frozen=True)
class Plot:
    """A drawing, and its numbers as a table."""

    title: str
    about: str
    svg: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int
    legend: Sequence[tuple[str, int]] = ()


def lines(title: str, about: str, series: Sequence[Series], x: str, y: str) -> Plot | None:
    """A line a series; None without a point."""
    shown = [Series(one.name, _thinned(_finite(one.points))) for one in series]
    shown = [one for one in shown if one.points]
    if not shown:
        return None
    frame = _Frame.around([point for one in shown for point in one.points])
    parts = frame.axes(x, y, whole=all(px == int(px) for one in shown for px, _ in one.points))
    for index, one in enumerate(shown):
        colour, dash = index % COLOURS, DASHES[index % len(DASHES)]
        path = "L".join(f"{frame.x(px):.1f} {frame.y(py):.1f}" for px, py in one.points)
        parts.append(f'<path d="M{path}" class="line s{colour}" stroke-dasharray="{dash}"/>')
        if len(one.points) <= MOST_ROWS:
            parts += [
                f'<circle cx="{frame.x(px):.1f}" cy="{frame.y(py):.1f}" r="3" class="f{colour}"/>'
                for px, py in one.points
            ]
    table = [(one.name, number(px), number(py)) for one in shown for px, py in one.points]
    legend = [(one.name, index % COLOURS) for index, one in enumerate(shown)] if len(shown) > 1 else []
    return _plot(title, about, parts, TOP + PLOT_HEIGHT + 36, ("series", x, y), table, legend)


def scatter(title: str, about: str, series: Sequence[Series], x: str, y: str) -> Plot | None:
    """A dot a point and the line x = y; None without a point."""
    shown = [Series(one.name, _thinned(_finite(one.points))) for one in series]
    points = [point for one in shown for point in one.points]
    if not points:
        return None
    low, high = min(min(p) for p in points), max(max(p) for p in points)
    frame = _Frame.around([(low, low), (high, high)])
    parts = frame.axes(x, y)
    corner = f"M{frame.x(frame.x0):.1f} {frame.y(frame.x0):.1f}L{frame.x(frame.x1):.1f} {frame.y(frame.x1):.1f}"
    parts.append(f'<path d="{corner}" class="grid" stroke-dasharray="4 4"/>')
    for index, one in enumerate(shown):
        look = f'r="2.5" class="f{index % COLOURS}" fill-opacity="0.6"'
        parts += [f'<circle cx="{frame.x(px):.1f}" cy="{frame.y(py):.1f}" {look}/>' for px, py in one.points]
    table = [(one.name, number(px), number(py)) for one in shown for px, py in one.points]
    legend = [(one.name, index % COLOURS) for index, one in enumerate(shown)]
    return _plot(title, about, parts, TOP + PLOT_HEIGHT + 36, ("series", x, y), table, legend)


def bars(title: str, about: str, rows: Sequence[Bar], unit: str) -> Plot | None:
    """A row of stacked lengths each; beyond MOST_ROWS rows a line a part, by the row's number. None without a row."""
    rows = [row for row in rows if row.parts]
    if not rows:
        return None
    table = [(row.name, name, number(value)) for row in rows for name, value in row.parts]
    rows = _merged(rows)
    names = list(dict.fromkeys(name for row in rows for name, _ in row.parts))
    if len(rows) > MOST_ROWS:
        return lines(title, about, _as_series(rows, names), "number", unit)
    longest = max(row.start + sum(value for _, value in row.parts) for row in rows) or 1.0
    ticks = _ticks(0.0, longest)
    scale = (WIDTH - LABEL - RIGHT) / max(ticks[-1], longest)
    bottom = TOP + (BAR + GAP) * len(rows)
    parts = []
    for tick in ticks:
        at = LABEL + tick * scale
        parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" class="grid"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 30}" text-anchor="end">{escape(unit)}</text>')
    for line, row in enumerate(rows):
        y, at = TOP + GAP / 2 + (BAR + GAP) * line, LABEL + row.start * scale
        parts.append(f'<text x="{LABEL - 6}" y="{y + BAR - 5}" text-anchor="end">{escape(_short(row.name))}</text>')
        for name, value in row.parts:
            colour = names.index(name) % COLOURS
            length = max(value * scale, 0.0)
            parts.append(
                f'<rect x="{at:.1f}" y="{y}" width="{length:.1f}" height="{BAR}" class="f{colour} bar">'
                f"<title>{escape(row.name)}: {escape(name)} {number(value)} {escape(unit)}</title></rect>"
            )
            at += length
    legend = [(name, index % COLOURS) for index, name in enumerate(names)] if len(names) > 1 else []
    return _plot(title, about, parts, bottom + 36, ("row", "part", unit), table, legend)


def number(value: float) -> str:
    """Four significant digits, whole ones in full."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


@dataclass(frozen=True)
class _Frame:
    """Axes of a plot: x0 to x1 and y0 to y1, in the plot's units."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def around(cls, points: Sequence[tuple[float, float]]) -> "_Frame":
        xs, ys = [x for x, _ in points], [y for _, y in points]
        x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
        return cls(min(x_ticks[0], *xs), max(x_ticks[-1], *xs), min(y_ticks[0], *ys), max(y_ticks[-1], *ys))

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + PLOT_HEIGHT - (value - self.y0) / (self.y1 - self.y0) * PLOT_HEIGHT

    def axes(self, x: str, y: str, whole: bool = False) -> list[str]:
        """Grid lines with their numbers, and the units. whole: x counts something."""
        bottom = TOP + PLOT_HEIGHT
        parts = []
        for tick in _ticks(self.y0, self.y1):
            at = self.y(tick)
            parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        for tick in _ticks(self.x0, self.x1):
            if whole and tick != int(tick):
                continue
            at = self.x(tick)
            parts.append(f'<path d="M{at:.1f} {bottom}v4" class="axis"/>')
            parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>')
        parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" class="axis"/>')
        parts.append(f'<text x="{LEFT}" y="{bottom + 32}">↑ {escape(y)}</text>')
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 32}" text-anchor="end">{escape(x)} →</text>')
        return parts


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that cover low to high; never fewer than two."""
    if high <= low:
        pad = abs(low) * 0.01 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [
        point for point in points if all(isinstance(value, int | float) and math.isfinite(value) for value in point)
    ]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS of them: of each group of neighbours the lowest and the highest, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / (MOST_POINTS // 2))
    kept = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        kept += sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    return kept


def _as_series(rows: Sequence[Bar], names: Sequence[str]) -> list[Series]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index, row in enumerate(rows):
        for name, value in row.parts:
            found[name].append((float(index), value))
    return [Series(name, points) for name, points in found.items()]


def _merged(rows: Sequence[Bar]) -> list[Bar]:
    """As many parts as there are colours: the largest over all rows, and what is left of each row at its end."""
    total: dict[str, float] = {}
    for row in rows:
        for name, value in row.parts:
            total[name] = total.get(name, 0.0) + value
    if len(total) <= COLOURS:
        return list(rows)
    large = set(sorted(total, key=lambda name: -total[name])[: COLOURS - 1])
    merged = []
    for row in rows:
        small = sum(value for name, value in row.parts if name not in large)
        kept = [(name, value) for name, value in row.parts if name in large]
        merged.append(Bar(row.name, [*kept, (f"{len(total) - len(large)} others", small)], row.start))
    return merged


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"


def _plot(
    title: str,
    about: str,
    parts: list[str],
    height: float,
    head: Sequence[str],
    table: Sequence[Sequence[str]],
    legend: Sequence[tuple[str, int]],
) -> Plot:
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}. {escape(about)}">'
        + "".join(parts)
        + "</svg>"
    )
    shown = list(table[:MOST_TABLE_ROWS])
    return Plot(title, about, svg, head, shown, len(table) - len(shown), legend)

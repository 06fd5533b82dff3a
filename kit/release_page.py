"""A release's report.html: one file, no script, light and dark, for a phone and for print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from kit.files import write_atomic
from kit.layout import release
from kit.release_report import ReleaseReport
from kit.steps import seconds_text, size_text

WIDTH, HEIGHT, LEFT, BASE = 460, 150, 60, 120
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">"""
STYLE = """
:root { color-scheme: light dark; --page: #fff; --panel: #f6f7f9; --text: #16191d; --quiet: #4c5561;
  --rule: #d3d8de; --link: #0b57a4; --good: #12662f; --bad: #a01616; --open: #6b4a00; --line: #2063b5; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --panel: #1d2127; --text: #e8ebee; --quiet: #aab3bd;
  --rule: #3a414a; --link: #82b8f5; --good: #7fd79a; --bad: #ff9c9c; --open: #f2c96b; --line: #6ea8f0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 16px 40px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 32px 0 8px; border-top: 1px solid var(--rule); padding-top: 8px; }
a { color: var(--link); } code { font-size: 0.86em; overflow-wrap: anywhere; } .quiet { color: var(--quiet); }
.yes { color: var(--good); } .no { color: var(--bad); } .missing { color: var(--open); }
table { border-collapse: collapse; width: 100%; font-size: 0.94rem; }
th, td { text-align: left; vertical-align: top; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: 12px 14px; min-width: 0; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: var(--text); } .axis { stroke: var(--quiet); fill: none; }
.line { stroke: var(--line); fill: none; stroke-width: 2; } .dot { fill: var(--line); } .cross { fill: var(--bad); }
@media (max-width: 560px) { thead { position: absolute; left: -999em; } table, tbody, tr, th, td { display: block; }
  tr { border-bottom: 1px solid var(--rule); padding: 6px 0; } th, td { border: 0; padding: 1px 0; } }
@media print { body { font-size: 11px; } .plots { grid-template-columns: 1fr 1fr; } }
"""


def write_release_page(report: ReleaseReport) -> Path:
    """`dist/NAME/report.html`."""
    path = release(report.name).folder / "report.html"
    write_atomic(path, render_page(report))
    return path


def render_page(report: ReleaseReport) -> str:
    """HTML."""
    word = {"yes": "✓ holds", "no": "✗ differs", "missing": "– none"}
    chain = [
        (link.name, f"<code>{escape(link.value)}</code>", _mark(link.holds, word[link.holds]), escape(link.why))
        for link in report.chain
    ]
    sizes = [("image, compressed", size_text(report.image_size))]
    sizes += [("squashfs", size_text(report.sqsh_size))] if report.sqsh_size is not None else []
    layers = [
        (f"<code>{escape(layer.digest)}</code>", "not here" if layer.size is None else size_text(layer.size))
        for layer in report.layers
    ]
    times = [(escape(name), seconds_text(value)) for name, value in report.seconds.items()]
    nights = [
        (
            escape(one.time),
            f"<code>{escape(one.commit[:12])}</code>",
            _mark("yes" if one.status == "passed" else "no", one.status),
        )
        for one in reversed(report.nights)
    ]
    earlier = [
        (when, f"<code>{escape(digest)}</code>", size_text(size)) for when, digest, size in reversed(report.earlier)
    ]
    suite = f'<a href="{escape(report.page)}">the suite\'s report</a>' if report.page else "no report of the suite"
    parts = [
        f"<h1>Release {escape(report.name)}: suite {escape(report.status)}</h1>",
        f'<p class="quiet">profile {escape(report.profile)}, image made {escape(report.made)}; {suite}</p>',
        "<h2>From commit to run</h2>",
        _table(("link", "value", "holds", "because"), chain),
        '<p class="quiet">As the record ties them; ./build.py verify compares each with its artifact.</p>',
        "<h2>Sizes</h2>",
        _table(("what", "size"), sizes),
        _table(("layer", "size"), layers),
    ]
    if times:
        parts += ["<h2>Times</h2>", _table(("what", "time"), times)]
    if report.nights:
        parts += ["<h2>Nights</h2>", '<div class="plots">', *_plots(report), "</div>"]
        parts.append(_table(("night", "commit", "outcome"), nights))
    if earlier:
        parts += ["<h2>Earlier images of this name</h2>", _table(("made", "digest", "size"), earlier)]
    return "\n".join(
        [
            f"{HEAD}<title>Release {escape(report.name)}</title>",
            f"<style>{STYLE}</style></head>",
            "<body><main>",
            *parts,
            "</main></body></html>\n",
        ]
    )


def _mark(state: str, text: str) -> str:
    return f'<strong class="{state}">{escape(text)}</strong>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already; the first of a row is its heading."""
    lines = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>\n' for row in rows
    )
    heads = "".join(f'<th scope="col">{escape(word)}</th>' for word in head)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>\n{lines}</tbody></table>"


def _plots(report: ReleaseReport) -> list[str]:
    """A plot a time that more than one night has."""
    names = dict.fromkeys(name for night in report.nights for name in night.seconds)
    series = {name: [(n, n.seconds[name]) for n in report.nights if name in n.seconds] for name in names}
    return [_plot(name, [(n.time, n.status, s) for n, s in held]) for name, held in series.items() if len(held) > 1]


def _plot(name: str, points: Sequence[tuple[str, str, float]]) -> str:
    most = max(value for _, _, value in points) or 1.0
    step = (WIDTH - LEFT - 14) / (len(points) - 1)
    at = [(LEFT + index * step, BASE - value / most * (BASE - 14)) for index, (_, _, value) in enumerate(points)]
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="{"dot" if status == "passed" else "cross"}">'
        f"<title>{escape(time)}: {value:.2f} s, {escape(status)}</title></circle>"
        for (x, y), (time, status, value) in zip(at, points, strict=True)
    )
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    about = f"{name} over {len(points)} nights: {points[0][2]:.2f} s at first, {points[-1][2]:.2f} s in the last"
    return (
        f"<figure><figcaption>{escape(name)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(about)}">'
        f'<path d="M{LEFT} 10V{BASE}H{WIDTH - 10}" class="axis"/><path d="M{path}" class="line"/>{dots}'
        f'<text x="{LEFT - 6}" y="20" text-anchor="end">{most:.3g} s</text>'
        f'<text x="{LEFT - 6}" y="{BASE}" text-anchor="end">0</text>'
        f'<text x="{LEFT}" y="{BASE + 18}">{escape(points[0][0][:10])}</text>'
        f'<text x="{WIDTH - 10}" y="{BASE + 18}" text-anchor="end">{escape(points[-1][0][:10])}</text></svg></figure>'
    )

"""Phases of a policy update beside others' ways, from runs of `functional refit-rates`: a part of docs/performance.md.

    python -m bench.refit                       measures the embedded recipe on CPU, in the newest release's squashfs
    python -m bench.refit --add rates.json …    takes in what was measured elsewhere, on GPUs say

Every run's result stays in docs/bench/refit.json, one for each model and device; the page is made of all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.page import put_section
from kit.errors import KitError
from kit.functional import newest_release
from kit.layout import REPO, release
from kit.run import make_container, run_container

KIT = "update"
PHASES: dict[str, str] = {
    "warm probe": "a request a worker; admission is open still",
    "drain": "rollouts under way (none here)",
    "see cache": "a request a worker",
    "pause": "vLLM's own pause, without its fixed sleep where no request is in flight",
    "form group": "first update only",
    "agree on plan": "first update only",
    "start": "two calls a worker; not by plan",
    "transfer": "the wire; by plan one call, else also vLLM's loader, which copies each tensor to its place",
    "finish": "a call a worker, and vLLM's processing of loaded layers; not by plan",
    "prove": "memory of both devices (nh), or SHA-256 on the host; within the call by plan, else two calls",
    "clear": "a call a worker",
    "commit": "two calls a worker",
    "resume": "a call a worker",
    "probe": "log-probs of the tokens of a prompt, one request; or of one token after each of 16 prompts",
}
"""In the order of an update, and what bounds each."""
AROUND = {
    "snapshot_s": "copying all weights to the host, with nothing beside it; a run waits for what rollouts leave of it",
    "foresee_s": "one forward pass over the probe's prompt",
    "stale control": "a proof of weights that were not sent; the suite's own check",
}
COLOURS = ("#2b6cb0", "#63b3ed", "#2c7a7b", "#68d391", "#b7791f", "#f6ad55", "#9b2c2c", "#fc8181", "#553c9a", "#b794f4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--add", type=Path, nargs="+", help="refit-rates.json of runs elsewhere; nothing is measured then")
    add("--name", help="the release whose squashfs is measured; default: the newest")
    add("--docs", type=Path, default=REPO / "docs")
    arguments = parser.parse_args()
    store = arguments.docs / "bench/refit.json"
    found: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    try:
        results = [read(path) for path in arguments.add] if arguments.add else [measured(arguments.name)]
    except KitError as error:
        sys.exit(f"error: {error}")
    for result in results:
        found[title(result["about"])] = result
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    ordered = sorted(found.values(), key=lambda one: (one["about"]["device"] != "cpu", one["about"]["bytes"]))
    (arguments.docs / "bench/refit.svg").write_text(plot(ordered))
    put_section(arguments.docs / "performance.md", "refit", "\n".join(page(ordered)))


def read(path: Path) -> dict[str, Any]:
    """A result file. Exits with an error for anything else."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        result["about"]["bytes"], result["rows"][KIT][0]["total"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        sys.exit(f"error: {path}: no result of `functional refit-rates` ({type(error).__name__}: {error})")
    return result


def measured(name: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        script = "cd /opt/functional && functional refit-rates recipes/grpo_cpu.yaml --out /out"
        squashfs = release(name or newest_release()).sqsh
        status = run_container(make_container(squashfs, ["bash", "-c", script], [f"{folder}:/out"], [], "none")).status
        if status != 0:
            sys.exit(f"error: functional refit-rates ended with status {status}")
        return read(Path(folder) / "refit-rates.json")


def title(about: dict[str, Any]) -> str:
    millions = about["parameters"] / 1e6
    size = f"{millions / 1000:.2f} G" if millions >= 100 else f"{millions:.1f} M"
    place = "one GPU shared by trainer and worker" if about["shared"] else f"{about['workers']} worker(s)"
    graphs = "" if about.get("enforce_eager", True) else ", CUDA graphs"
    return f"{size} parameters, {about['device']}, {place}{graphs}"


def median(rows: list[dict[str, float]], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return statistics.median(values) if values else None


INTRODUCTION = """## Refit

Made by `make bench BENCH=refit`. Medians of the rounds of one run each, in milliseconds, with no request in flight; the
ways take turns. Data: [bench/refit.json](bench/refit.json).

![time by phase](bench/refit.svg)
"""


def page(results: list[dict[str, Any]]) -> list[str]:
    heads = [title(result["about"]) for result in results]
    phases, around = ({name: row for name, row in rows(results, told).items() if any(row)} for told in (PHASES, AROUND))
    lines = [INTRODUCTION, *table("", heads, summary(results))]
    lines += ["", "What bounds each phase:", "", *table("phase", heads, phases)]
    return [*lines, "", "Around the update, off its path:", "", *table("", heads, around)]


def rows(results: list[dict[str, Any]], told: dict[str, str]) -> dict[str, list[str]]:
    """Of the update, each name with what is told of it."""
    return {
        f"{name}: {what}": [milliseconds(median(result["rows"][KIT], name)) for result in results]
        for name, what in told.items()
    }


def summary(results: list[dict[str, Any]]) -> dict[str, list[str]]:
    cells = {"bytes sent": [f"{result['about']['bytes'] / 1e9:.3f} GB" for result in results]}
    cells["proof"] = [result["about"]["proof"] for result in results]
    cells["by plan"] = ["yes" if result["about"].get("by_plan") else "no" for result in results]
    cells["requests of a probe, a worker"] = [str(result["about"].get("probe_requests", 16)) for result in results]
    cells["processors; load average of 5 minutes at the end"] = [
        f"{result['about']['processors']}; {result['about']['load']:.1f}" for result in results
    ]
    cells["rounds"] = [str(len(result["rows"][KIT])) for result in results]
    open_again = [f"**{milliseconds(shut(one))}**" for one in results]
    cells["**admission shut to open**, proof and probe included"] = open_again
    cells["the same without the probe"] = [milliseconds(shut(one, without="probe")) for one in results]
    cells["growth of each GPU's memory over the rounds, MiB"] = [growth(one["about"]) for one in results]
    for way in results[0]["rows"]:
        cells[way] = [milliseconds(median(result["rows"][way], "total")) for result in results]
    return cells


def shut(result: dict[str, Any], without: str = "") -> float:
    rows: list[dict[str, float]] = result["rows"][KIT]
    return statistics.median(row["shut"] - row.get(without, 0.0) for row in rows)


def growth(about: dict[str, Any]) -> str:
    """From the first round that counts, by when each way has been gone once, to the last."""
    used = about.get("memory_mib", [])[1:]
    return ", ".join(str(last - first) for first, last in zip(used[0], used[-1], strict=True)) if used else ""


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f}" if seconds < 0.1 else f"{seconds * 1000:.0f}"


def table(corner: str, heads: list[str], cells: dict[str, list[str]]) -> list[str]:
    lines = [f"| {corner} | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    return lines + [f"| {name} | {' | '.join(values)} |" for name, values in cells.items()]


def plot(results: list[dict[str, Any]]) -> str:
    """One block a result: the update's phases end to end, then the other ways; each block has a scale of its own."""
    width, left, bar, top = 860, 250, 20, 8
    parts: list[str] = []
    y = top
    for result in results:
        parts.append(f'<text x="8" y="{y + 14}" font-weight="bold">{title(result["about"])}</text>')
        y += 22
        totals = {way: median(rows, "total") or 0.0 for way, rows in result["rows"].items()}
        scale = (width - left - 90) / max(totals.values())
        for way, total in totals.items():
            parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{way}</text>')
            x = float(left)
            taken = result["rows"][way]
            named = [(name, median(taken, name) or 0.0) for name in PHASES] if way == KIT else [(way, total)]
            for index, (name, seconds) in enumerate(pair for pair in named if pair[1]):
                colour = COLOURS[index % len(COLOURS)] if way == KIT else "#a0aec0"
                label = f"{name} {milliseconds(seconds)} ms"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{seconds * scale:.1f}" height="{bar - 4}" fill="{colour}">'
                    f"<title>{label}</title></rect>"
                )
                if seconds * scale > 7 * len(name):
                    parts.append(f'<text x="{x + 3:.1f}" y="{y + 12}" font-size="11" fill="white">{name}</text>')
                x += seconds * scale
            parts.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{milliseconds(total)} ms</text>')
            y += bar
        y += 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()

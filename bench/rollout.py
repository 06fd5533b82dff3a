"""Compare the runtime's rollout client with a minimal one, in the image: a table in docs/.

    python -m bench.rollout

On a server that answers at once, and on a real Dynamo frontend with a worker on CPU. Processor time is user and system
time of the client's process, all threads; medians of rounds in which the clients take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.functional import newest_release
from kit.layout import REPO, release
from kit.run import make_container, run_container

MOUNTED = ("bench", "functional", "pyproject.toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--name", help="the release whose squashfs it runs in; default: the newest")
    add("--docs", type=Path, default=REPO / "docs/bench")
    add("--rounds", type=int, default=5, help="of each client in each cell")
    add("--only", choices=["instant", "memory", "real"])
    add("--packages", type=Path, help="a folder of Python packages that the image lacks")
    arguments = parser.parse_args()
    result = arguments.docs / "rollout.json"
    found = json.loads(result.read_text()) if result.exists() else {}
    parts = [arguments.only] if arguments.only else ["instant", "memory", "real"]
    try:
        for part in parts:
            name = arguments.name or newest_release()
            found[part] = run_inside("rollout_inside", part, arguments.rounds, name, arguments.packages)
    except KitError as error:
        sys.exit(f"error: {error}")
    found["processors"] = os.cpu_count()
    arguments.docs.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(found, indent=1) + "\n")
    page = "\n".join(table(found))
    (arguments.docs / "rollout.md").write_text(page)
    print(page)


def run_inside(module: str, part: str, rounds: int, name: str, packages: Path | None = None) -> Any:
    """What bench.MODULE writes to its file for this part, in the release's squashfs with this tree's code."""
    folder = Path(tempfile.mkdtemp(prefix="bench-rollout-"))
    mounts = [f"{REPO / place}:/src/{place}:ro" for place in MOUNTED] + [f"{folder}:/out"]
    env = ["PYTHONPATH=/src", "PYTHONDONTWRITEBYTECODE=1"]
    if packages is not None:
        mounts.append(f"{packages.absolute()}:/packages:ro")
        env[0] += ":/packages"
    script = f"cd /src && python -m bench.{module} {part} {rounds} /out"
    container = make_container(release(name).sqsh, ["bash", "-c", script], mounts, env, "none")
    status = run_container(container).status
    if status != 0:
        sys.exit(f"error: {part}: ended with status {status}; what it wrote is in {folder}")
    found = json.loads((folder / f"{part}.json").read_text())
    shutil.rmtree(folder)
    return found


def table(found: dict[str, Any]) -> list[str]:
    lines = ["# Rollout client", "", "Made by `make bench BENCH=rollout`.", ""]
    lines.append(f"{found['processors']} processors, shared with the server. Prompts of 512 tokens, eight times each.")
    for part, server in (
        ("instant", "A server that answers at once"),
        ("real", "Dynamo's frontend, one worker on CPU"),
    ):
        if part in found:
            lines += ["", f"## {server}", "", *cells(found[part])]
    if "memory" in found:
        lines += ["", "## Memory", "", *memory(found["memory"])]
    return [*lines, ""]


def cells(measured: Sequence[dict[str, Any]]) -> list[str]:
    """A row a cell: processor milliseconds a request, and what the ratio of the clients' medians is."""
    lines = [
        "| tokens | in flight | requests | ours, ms | minimal, ms | ratio | by round | our tokens a processor second |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for key in dict.fromkeys((row["tokens"], row["inflight"], row["requests"]) for row in measured):
        rows = [row for row in measured if (row["tokens"], row["inflight"], row["requests"]) == key]
        times = {
            client: [row["processor_s"] / row["requests"] * 1e3 for row in rows if row["client"] == client]
            for client in ("ours", "minimal")
        }
        ours, minimal = (statistics.median(times[client]) for client in ("ours", "minimal"))
        ratios = [mine / other for mine, other in zip(times["ours"], times["minimal"], strict=True)]
        tokens, inflight, requests = key
        lines.append(
            f"| {tokens} | {inflight} | {requests} | {ours:.3f} | {minimal:.3f} | {ours / minimal:.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} | {tokens / ours * 1e3:.3g} |"
        )
    return lines


def memory(measured: Sequence[dict[str, Any]]) -> list[str]:
    """A row a size: what the client's process grew by, and what of that an answer took."""
    lines = ["| tokens | in flight | answers, MB | peak above the start, MB | a request, KB | peak / answers |"]
    lines.append("|---|---|---|---|---|---|")
    for row in measured:
        grown = row["peak"] - row["before"]
        lines.append(
            f"| {row['tokens']} | {row['inflight']} | {row['answers'] / 1e6:.0f} | {grown / 1e6:.0f} | "
            f"{grown / row['inflight'] / 1e3:.0f} | {grown / row['answers']:.2f} |"
        )
    return lines


if __name__ == "__main__":
    main()

"""Compare the chat path's processor time a turn with the direct path's, in the image: a table in docs/.

    python -m bench.chat

Both in one process and in turns, with everything that a run does: gate, journal, checks; both from text to text: the
direct path encodes what is new in a turn, sends token IDs, and decodes the answer. A server that answers at once stands
for the fleet, and another process for the agents. Processor time is user and system time of the process that holds the
chat server or the client, all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rollout import run_inside
from kit.errors import KitError
from kit.functional import newest_release
from kit.layout import REPO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="the release whose squashfs it runs in; default: the newest")
    parser.add_argument("--docs", type=Path, default=REPO / "docs/bench")
    parser.add_argument("--rounds", type=int, default=7, help="of each path in each cell")
    arguments = parser.parse_args()
    try:
        measured = run_inside("chat_inside", "chat", arguments.rounds, arguments.name or newest_release())
    except KitError as error:
        sys.exit(f"error: {error}")
    found = {"measured": measured, "processors": os.cpu_count()}
    arguments.docs.mkdir(parents=True, exist_ok=True)
    (arguments.docs / "chat.json").write_text(json.dumps(found, indent=1) + "\n")
    page = "\n".join(table(measured))
    (arguments.docs / "chat.md").write_text(page)
    print(page)


def table(measured: Sequence[dict[str, Any]]) -> list[str]:
    """A row a cell: processor milliseconds a turn of both paths, and the ratio of their medians."""
    lines = ["# The chat path", "", "Made by `make bench BENCH=chat`.", ""]
    lines.append(f"{os.cpu_count()} processors, shared with the agents and the server. Processor milliseconds a turn:")
    lines.append(
        "chat; direct, from text to text; and of this the client alone, which is given token IDs and gives some."
    )
    lines += [
        "",
        "| prompt | answer | turns before | in flight | chat | direct | ratio | by round | client alone | ratio |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    cells = ("prompt", "tokens", "before", "inflight")
    for key in dict.fromkeys(tuple(row[name] for name in cells) for row in measured):
        rows = [row for row in measured if tuple(row[name] for name in cells) == key]
        times = {
            path: [row["processor_s"] / row["turns"] * 1e3 for row in rows if row["path"] == path]
            for path in ("chat", "direct", "client")
        }
        chat, direct, client = (statistics.median(of_path) for of_path in times.values())
        ratios = [one / other for one, other in zip(times["chat"], times["direct"], strict=True)]
        figures = (*key, f"{chat:.3f}", f"{direct:.3f}", f"{chat / direct:.2f}")
        figures += (f"{min(ratios):.2f} to {max(ratios):.2f}", f"{client:.3f}", f"{chat / client:.2f}")
        lines.append(f"| {' | '.join(map(str, figures))} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()

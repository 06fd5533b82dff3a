"""The driver's processor time for an update of up to 256 workers: a section of docs/performance.md.

    python -m bench.refit_scale

Runs bench.refit_scale_inside in the newest release's squashfs, with this tree's code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.page import put_section
from kit.errors import KitError
from kit.functional import newest_release
from kit.layout import REPO, release
from kit.run import make_container, run_container

MOUNTED = ("bench", "functional")
TARGET_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="the release whose squashfs it runs in; default: the newest")
    parser.add_argument("--docs", type=Path, default=REPO / "docs")
    arguments = parser.parse_args()
    try:
        rows = measured(arguments.name or newest_release())
    except KitError as error:
        sys.exit(f"error: {error}")
    store = arguments.docs / "bench/refit-scale.json"
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text(json.dumps(rows, indent=1) + "\n")
    put_section(arguments.docs / "performance.md", "refit-scale", "\n".join(page(rows)))


def measured(name: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        mounts = [f"{REPO / place}:/src/{place}:ro" for place in MOUNTED] + [f"{folder}:/out"]
        script = "cd /src && /opt/trainer_venv/bin/python -m bench.refit_scale_inside /out/scale.json"
        env = ["PYTHONPATH=/src", "PYTHONDONTWRITEBYTECODE=1"]
        status = run_container(make_container(release(name).sqsh, ["bash", "-c", script], mounts, env, "none")).status
        if status != 0:
            sys.exit(f"error: bench.refit_scale_inside ended with status {status}")
        found: list[dict[str, Any]] = json.loads((Path(folder) / "scale.json").read_text())
        return found


INTRODUCTION = """## Refit at scale

Made by `make bench BENCH=refit-scale`: the real transaction against simulated workers, each a real HTTP server on
loopback that answers at once, with the manifest of a Qwen3-8B, updated by plan. {processors} processors, which the
servers share. Milliseconds, medians: of the driver's processor time, a worker; and wall time of the whole update.

| workers | control calls | with the probe's requests | wall, control | wall, all | updates counted |
|---:|---:|---:|---:|---:|---:|"""


def page(rows: list[dict[str, Any]]) -> list[str]:
    lines = [INTRODUCTION.format(processors=os.cpu_count())]
    for row in rows:
        count = row["workers"]
        cells = [row["control_cpu_s"] / count, row["all_cpu_s"] / count, row["control_wall_s"], row["all_wall_s"]]
        updates = f"{row['control_updates']}, {row['all_updates']}"
        lines.append(f"| {count} | " + " | ".join(f"{cell * 1000:.2f}" for cell in cells) + " | " + updates + " |")
    held = all(row["control_cpu_s"] / row["workers"] <= TARGET_S for row in rows)
    lines += ["", f"Target: at most {TARGET_S * 1000:g} ms of control calls a worker: {'met' if held else 'missed'}."]
    lines += [
        "The calls are bounded by Python's HTTP client and threads, the probe by the rollout client's time a request."
    ]
    return lines


if __name__ == "__main__":
    main()

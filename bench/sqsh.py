#!/usr/bin/env python3
"""Squashfs conversion, ours and others', of one image in one run: a table and a plot in docs/.

    bench/sqsh.py dist/cpu/oci --work .state/bench

Every way reads the same layers, which are in the page cache, and ends with its output synced. Peak memory is the sum
over the processes of a way; peak extra disk is what lies in its folder at the end of a step, so it can be understated
for others and is exact for ours. A way whose tool is missing says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
SQSH = [sys.executable, "-m", "sqsh"]
FLOOR = "floor: mksquashfs of the unpacked tree"
OURS = "ours"
OTHERS = "skopeo + umoci + mksquashfs"
ZSTD = "ours, zstd layers"
CHANGED = "ours, one file changed on top"
COPY = "copy and sync of our output"
FIRST = "ours, first with a cache"
EXPORT = "tar of the unpacked tree (as docker export gives it) | tar2sqfs"
MKSQUASHFS = ["-noappend", "-no-progress", "-quiet", "-all-root", "-comp", "zstd", "-Xcompression-level", "1"]


@dataclass
class Row:
    way: str
    wall_s: float
    cpu_s: float
    memory: int
    disk: int
    size: int
    load: float


class Bench:
    def __init__(self, image: Path, work: Path) -> None:
        self.image = image
        self.work = work
        self.rows: list[Row] = []

    def measure(self, way: str, steps: list[str], out: Path, keep: bool = False) -> None:
        """Run shell commands one after the other and note what they took, beyond what lies on the disk already."""
        base = taken(self.work)
        load = os.getloadavg()[0]
        memory = Memory()
        disk = 0
        before = os.times()
        started = time.monotonic()
        waiting = 0.0
        for step in steps:
            print(f"  {step}", file=sys.stderr)
            process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", step], cwd=REPO, stderr=subprocess.PIPE, text=True
            )
            with memory.of(process.pid):
                error = process.communicate()[1]
            if process.returncode != 0:
                sys.exit(f"error: {way}: {error.strip()[-500:]}")
            paused = time.monotonic()
            disk = max(disk, taken(self.work) - base)
            waiting += time.monotonic() - paused
        with out.open("rb") as file:
            os.fsync(file.fileno())
        wall = time.monotonic() - started - waiting
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        self.rows.append(Row(way, wall, cpu, memory.peak, disk, out.stat().st_size, load))
        print(f"{way}: {wall:.1f} s, CPU {cpu:.1f} s, load before {load:.1f}", file=sys.stderr)
        if not keep:
            out.unlink()


class Memory:
    """Peak of what a process and its children hold in memory together, looked at ten times a second."""

    def __init__(self) -> None:
        self.peak = 0
        self._pid = 0
        self._stopped = threading.Event()

    def of(self, pid: int) -> Memory:
        self._pid = pid
        self._stopped.clear()
        return self

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.1):
            self.peak = max(self.peak, sum(map(_resident, _family(self._pid))))


def _family(pid: int) -> list[int]:
    found = [pid]
    for member in found:
        try:
            for task in Path(f"/proc/{member}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def taken(folder: Path) -> int:
    return int(
        subprocess.run(["du", "-s", "-B1", folder], capture_output=True, text=True, check=True).stdout.split()[0]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path, nargs="?", default=REPO / "dist/cpu/oci")
    parser.add_argument("--work", type=Path, default=REPO / ".state/bench")
    parser.add_argument("--docs", type=Path, default=REPO / "docs/bench")
    parser.add_argument("--rounds", type=int, default=1, help="of ours, the others' way and the floor; the best counts")
    parser.add_argument("--no-zstd", action="store_true", help="leave out zstd layers, which take long to make")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    try:
        rows, about = run(arguments.image.absolute(), arguments.work.absolute(), arguments.rounds, arguments.no_zstd)
    finally:
        shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.docs.mkdir(parents=True, exist_ok=True)
    (arguments.docs / "sqsh.json").write_text(
        json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
    )
    (arguments.docs / "sqsh.md").write_text(table(rows, about))
    (arguments.docs / "sqsh.svg").write_text(plot(rows))
    print(table(rows, about))


def run(image: Path, work: Path, rounds: int, no_zstd: bool) -> tuple[list[Row], dict[str, Any]]:
    bench = Bench(image, work)
    ours, again, out, tree, layout = (work / name for name in ("ours.sqsh", "again.sqsh", "out.sqsh", "tree", "layout"))
    squash = words("mksquashfs", tree, out, *MKSQUASHFS)
    warm(image)
    for _ in range(rounds):
        bench.measure(OURS, [words(*SQSH, image, ours, "--no-cache", "--quiet")], ours)
        others = [
            words("skopeo", "copy", "-q", f"oci:{image}", f"oci:{layout}:image"),
            words("umoci", "raw", "unpack", "--image", f"{layout}:image", tree),
            squash,
        ]
        bench.measure(OTHERS, others, out)
        shutil.rmtree(layout)
        unpacked, entries = taken(tree), sum(len(folders) + len(files) for _, folders, files in os.walk(tree))
        bench.measure(FLOOR, [squash], out)
        if shutil.which("tar2sqfs"):
            pack = words("tar2sqfs", "-q", "-c", "zstd", "-X", "level=1", "-j", str(os.cpu_count()), out)
            bench.measure(EXPORT, [f"{words('tar', '-C', tree, '-cf', '-', '.')} | {pack}"], out)
        shutil.rmtree(tree)
    cache = work / "cache"
    bench.measure(FIRST, [words(*SQSH, image, ours, "--cache", cache, "--quiet")], ours, keep=True)
    changed = one_file_more(image, work / "changed")
    bench.measure(CHANGED, [words(*SQSH, changed, again, "--cache", cache, "--quiet")], again)
    bench.measure(COPY, [words("cp", "--reflink=never", ours, again)], again)
    ours.unlink()
    shutil.rmtree(cache)
    if not no_zstd:
        zstd = work / "zstd"
        to_zstd = ["--dest-compress", "--dest-compress-format", "zstd", "--format", "oci"]
        subprocess.run(["skopeo", "copy", "-q", *to_zstd, f"oci:{image}", f"oci:{zstd}"], check=True)
        bench.measure(ZSTD, [words(*SQSH, zstd, ours, "--no-cache", "--quiet")], ours)
    about = {
        "layers": sum(path.stat().st_size for path in (image / "blobs/sha256").iterdir()),
        "unpacked": unpacked,
        "entries": entries,
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    return best(bench.rows), about


def words(*parts: str | Path) -> str:
    return shlex.join(map(str, parts))


def best(rows: list[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        if row.way not in found or row.wall_s < found[row.way].wall_s:
            found[row.way] = row
    return list(found.values())


def warm(image: Path) -> None:
    for path in (image / "blobs/sha256").iterdir():
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass


def one_file_more(image: Path, target: Path) -> str:
    """The image with a layer on top that holds one changed file; its other blobs are links to the image's."""
    shutil.copytree(image, target, copy_function=os.link)
    index = json.loads((target / "index.json").read_text())
    manifest = json.loads(read(target, index["manifests"][0]["digest"]))
    config = json.loads(read(target, manifest["config"]["digest"]))
    layer = BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        info = tarfile.TarInfo("opt/functional/changed.py")
        info.size = 5
        archive.addfile(info, BytesIO(b"x = 1"))
    config["rootfs"]["diff_ids"].append(write(target, layer.getvalue()))
    manifest["layers"].append(descriptor(target, layer.getvalue(), "application/vnd.oci.image.layer.v1.tar"))
    manifest["config"] |= descriptor(target, json.dumps(config).encode(), manifest["config"]["mediaType"])
    index["manifests"] = [descriptor(target, json.dumps(manifest).encode(), index["manifests"][0]["mediaType"])]
    (target / "index.json").unlink()
    (target / "index.json").write_text(json.dumps(index))
    return shlex.quote(str(target))


def descriptor(layout: Path, data: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": write(layout, data), "size": len(data)}


def read(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / digest.replace(":", "/")).read_bytes()


def write(layout: Path, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    (layout / "blobs/sha256" / name).write_bytes(data)
    return f"sha256:{name}"


def table(rows: list[Row], about: dict[str, Any]) -> str:
    gb = 1e9
    lines = [
        "# Squashfs conversion",
        "",
        f"One image: {about['layers'] / gb:.2f} GB of gzip layers, {about['unpacked'] / gb:.2f} GB unpacked, "
        f"{about['entries']} entries; {about['processors']} processors, Linux {about['kernel']}, "
        f"Python {about['python']}. "
        "Layers in the page cache, outputs synced, zstd level 1, blocks of 128 kB. Load: the machine's before the run, "
        "others' work included; where it is above 1, CPU time compares better than wall time.",
        "",
        "| way | wall s | CPU s | peak memory MB | peak extra disk GB | size GB | load |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        way = row.way.replace("|", "into")
        lines.append(
            f"| {way} | {row.wall_s:.1f} | {row.cpu_s:.1f} | {row.memory / 1e6:.0f} | {row.disk / gb:.2f} | "
            f"{row.size / gb:.3f} | {row.load:.1f} |"
        )
    found = {row.way: row for row in rows}
    lines += ["", *(f"- {text}" for text in ratios(found)), "", "![wall time](sqsh.svg)", ""]
    return "\n".join(lines)


def ratios(rows: dict[str, Row]) -> list[str]:
    def ratio(one: str, other: str, value: Callable[[Row], float]) -> float:
        return value(rows[one]) / value(rows[other])

    pairs = [(OTHERS, OURS), (OURS, FLOOR), (CHANGED, COPY), (CHANGED, OURS), (OURS, ZSTD)]
    return [
        f"{one} / {other}: wall {ratio(one, other, lambda row: row.wall_s):.2f}, "
        f"CPU {ratio(one, other, lambda row: row.cpu_s):.2f}"
        for one, other in pairs
        if one in rows and other in rows
    ]


def plot(rows: list[Row]) -> str:
    """Wall time as bars, CPU time as a line in each."""
    width, height, left = 900, 34, 430
    longest = max(max(row.wall_s, row.cpu_s) for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * len(rows) + 30}" '
        'font-family="sans-serif" font-size="13">'
    ]
    for place, row in enumerate(rows):
        y = place * height + 8
        scale = (width - left - 90) / longest
        colour = "#2b6cb0" if row.way.startswith("ours") else "#a0aec0"
        parts.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{row.way}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{row.wall_s * scale:.1f}" height="14" fill="{colour}"/>')
        parts.append(f'<rect x="{left}" y="{y + 16}" width="{row.cpu_s * scale:.1f}" height="5" fill="#ed8936"/>')
        parts.append(
            f'<text x="{left + max(row.wall_s, row.cpu_s) * scale + 6:.1f}" y="{y + 13}">{row.wall_s:.1f} s</text>'
        )
    parts.append(f'<text x="{left}" y="{height * len(rows) + 22}">bars: wall time; orange: CPU time</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()

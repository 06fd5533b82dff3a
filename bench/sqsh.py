"""Compare squashfs converters on one image in one run: a table and a plot in docs/.

    python -m bench.sqsh dist/cpu/oci --registry 127.0.0.1:5000/nemo-rl:cpu

Every method reads the same layers, which are in the page cache, and ends with its output synced. enroot and docker read
them from a registry on loopback; CPU time and memory of docker's daemon are not measured. A method whose tool or
registry is missing is left out, and the table says so.
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
from collections.abc import Callable
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

from bench import sqsh_options
from bench.measure import Row, best, measure, words
from bench.sqsh_options import Choice, warm

REPO = Path(__file__).resolve().parent.parent
SQSH = [sys.executable, "-m", "sqsh"]
FLOOR = "floor: mksquashfs of the unpacked tree"
OURS = "ours"
OTHERS = "skopeo + umoci + mksquashfs"
REGISTRY = "ours, from the registry"
ENROOT = "enroot import"
TUNED = "enroot import, tuned to zstd 1"
EXPORT = "docker pull, create, export | tar2sqfs"
ZSTD = "ours, zstd layers"
CHANGED = "ours, one file changed on top"
COPY = "copy and sync of our output"
FIRST = "ours, first with a cache"
TURNS = 3
ZSTD_1 = ["-comp", "zstd", "-Xcompression-level", "1"]
MKSQUASHFS = ["-noappend", "-no-progress", "-quiet", "-all-root", *ZSTD_1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("image", type=Path, nargs="?", default=REPO / "dist/cpu/oci")
    add("--registry", help="the same image on loopback, for enroot and docker; default: the record's push")
    add("--work", type=Path, default=REPO / ".state/bench")
    add("--docs", type=Path, default=REPO / "docs/bench")
    add("--rounds", type=int, default=3, help="of each method; the fastest counts")
    add("--only", choices=["ways", "options"], help="the methods, or the choices of compressor, level and block size")
    arguments = parser.parse_args()
    if not (arguments.image / "index.json").exists():
        sys.exit(f"error: no image at {arguments.image}: make it first (make image), or name an OCI layout")
    work = arguments.work.absolute()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    result = arguments.docs / "sqsh.json"
    found = json.loads(result.read_text()) if result.exists() else {}
    try:
        bench = Bench(arguments.image.absolute(), work, arguments.registry or recorded(arguments.image))
        if arguments.only != "options":
            found |= bench.ways(arguments.rounds)
        if arguments.only != "ways":
            choices = sqsh_options.compare(SQSH, bench.image, work / "choice.sqsh", arguments.rounds)
            found |= {"options": [asdict(choice) for choice in choices]}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    arguments.docs.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(found, indent=2) + "\n")
    if "rows" not in found:
        sys.exit(f"error: {result} has no rows yet: run without --only first")
    rows = [Row(**row) for row in found["rows"]]
    page = table(rows, found["about"], [Choice(**choice) for choice in found.get("options", [])])
    (arguments.docs / "sqsh.md").write_text(page)
    (arguments.docs / "sqsh.svg").write_text(plot(rows))
    print(page)


class Bench:
    def __init__(self, image: Path, work: Path, registry: str) -> None:
        self.image = image
        self._work = work
        self._registry = registry
        self._ours = work / "ours.sqsh"
        self._out = work / "out.sqsh"
        self._missing: list[str] = []

    def ways(self, rounds: int) -> dict[str, Any]:
        rows: list[Row] = []
        zstd = self._zstd_layers()
        changed = one_file_more(self.image, self._work / "changed")
        for _ in range(rounds):
            self._missing = []
            warm(self.image)
            warm(zstd)
            rows += [self._convert(OURS, self.image, "--no-cache"), self._convert(ZSTD, zstd, "--no-cache")]
            tree_rows, unpacked, entries = self._from_tree()
            rows += tree_rows + self._from_cache(changed) + self._from_registry()
        about = {
            "layers": sum(path.stat().st_size for path in (self.image / "blobs/sha256").iterdir()),
            "unpacked": unpacked,
            "entries": entries,
            "processors": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "rounds": rounds,
            "missing": self._missing,
        }
        return {"about": about, "rows": [asdict(row) for row in best(rows)]}

    def _convert(self, way: str, image: str | Path, *options: str | Path, keep: bool = False) -> Row:
        return measure(way, [words(*SQSH, image, self._ours, "--quiet", *options)], self._ours, keep)

    def _zstd_layers(self) -> Path:
        target = self._work / "zstd"
        to_zstd = ["--dest-compress", "--dest-compress-format", "zstd", "--format", "oci"]
        subprocess.run(["skopeo", "copy", "-q", *to_zstd, f"oci:{self.image}", f"oci:{target}"], check=True)
        return target

    def _from_tree(self) -> tuple[list[Row], int, int]:
        tree, layout = self._work / "tree", self._work / "layout"
        squash = words("mksquashfs", tree, self._out, *MKSQUASHFS)
        unpack = [
            words("skopeo", "copy", "-q", f"oci:{self.image}", f"oci:{layout}:image"),
            words("umoci", "raw", "unpack", "--image", f"{layout}:image", tree),
        ]
        rows = [measure(OTHERS, [*unpack, squash], self._out)]
        shutil.rmtree(layout)
        unpacked, entries = taken(tree), sum(len(folders) + len(files) for _, folders, files in os.walk(tree))
        rows.append(measure(FLOOR, [squash], self._out))
        shutil.rmtree(tree)
        return rows, unpacked, entries

    def _from_cache(self, changed: Path) -> list[Row]:
        """Copies and conversions alternate: writes to memory that was just freed are faster than writes for which a
        virtual machine must first get memory from its host."""
        cache, own = self._work / "cache", self._work / "own-cache"
        rows = [self._convert(FIRST, self.image, "--cache", cache, keep=True)]
        for _ in range(TURNS):
            shutil.copytree(cache, own)
            again = words(*SQSH, changed, self._out, "--quiet", "--cache", own)
            rows.append(measure(CHANGED, [again], self._out))
            rows.append(measure(COPY, [words("cp", "--reflink=never", self._ours, self._out)], self._out))
            shutil.rmtree(own)
        self._ours.unlink()
        shutil.rmtree(cache)
        return rows

    def _from_registry(self) -> list[Row]:
        if not self._registry:
            hint = "no registry (`make push`, `./build.py services start`, or --registry)"
            self._missing += [f"{way}: {hint}" for way in (REGISTRY, ENROOT, TUNED, EXPORT)]
            return []
        rows = [self._convert(REGISTRY, self._registry, "--no-cache")]
        if shutil.which("enroot"):
            rows += [self._enroot(ENROOT, ""), self._enroot(TUNED, shlex.join(ZSTD_1))]
        else:
            self._missing += [f"{way}: enroot is not installed" for way in (ENROOT, TUNED)]
        if shutil.which("tar2sqfs") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
            rows.append(self._docker())
        else:
            self._missing.append(f"{EXPORT}: no docker, or no tar2sqfs")
        return rows

    def _enroot(self, way: str, squash_options: str) -> Row:
        host, _, rest = self._registry.partition("/")
        folders = {name: self._work / "enroot" / name for name in ("CACHE", "DATA", "RUNTIME", "TEMP")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        settings = [f"ENROOT_{name}_PATH={folder}" for name, folder in folders.items()]
        settings += ["ENROOT_ALLOW_HTTP=yes", *([f"ENROOT_SQUASH_OPTIONS={squash_options}"] if squash_options else [])]
        step = words("env", *settings, "enroot", "import", "--output", self._out, f"docker://{host}#{rest}")
        row = measure(way, [step], self._out)
        shutil.rmtree(self._work / "enroot")
        return row

    def _docker(self) -> Row:
        pack = words("tar2sqfs", "-q", "-c", "zstd", "-X", "level=1", "-j", str(os.cpu_count()), self._out)
        create = words("docker", "create", "--name", "bench-export", self._registry, "true")
        steps = [words("docker", "pull", "-q", self._registry), create, f"docker export bench-export | {pack}"]
        row = measure(EXPORT, steps, self._out)
        subprocess.run(["docker", "rm", "bench-export"], check=True, capture_output=True)
        subprocess.run(["docker", "rmi", self._registry], check=True, capture_output=True)
        return row


def recorded(image: Path) -> str:
    """The reference that the kit pushed the image to, if it is on loopback and answers; else empty."""
    record = image.absolute().parent / "record.json"
    push = json.loads(record.read_text()).get("push") if record.exists() else None
    reference: str = push["reference"] if push else ""
    asked = ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{reference}"]
    if reference.startswith("127.") and subprocess.run(asked, capture_output=True).returncode == 0:
        return reference
    return ""


def taken(folder: Path) -> int:
    answer = subprocess.run(["du", "-s", "-B1", folder], capture_output=True, text=True, check=True)
    return int(answer.stdout.split()[0])


def one_file_more(image: Path, target: Path) -> Path:
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
    return target


def descriptor(layout: Path, data: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": write(layout, data), "size": len(data)}


def read(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / digest.replace(":", "/")).read_bytes()


def write(layout: Path, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    (layout / "blobs/sha256" / name).write_bytes(data)
    return f"sha256:{name}"


def table(rows: list[Row], about: dict[str, Any], choices: list[Choice]) -> str:
    gb = 1e9
    lines = [
        "# Squashfs conversion",
        "",
        f"One image: {about['layers'] / gb:.2f} GB of gzip layers, {about['unpacked'] / gb:.2f} GB unpacked, "
        f"{about['entries']} entries; {about['processors']} processors, Linux {about['kernel']}, "
        f"Python {about['python']}. Layers in the page cache, outputs synced; zstd level 1 and blocks of 128 kB where "
        f"nothing else is said. The quickest of {about['rounds']} rounds of each, in which one file changed and the "
        f"copy take {TURNS} turns. Load: the machine's before the run. "
        "CPU time and memory of docker's daemon are not counted.",
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
    lines += ["", *(f"- {text}" for text in ratios(found)), *(f"- not here: {text}" for text in about["missing"])]
    lines += ["", "![wall time](sqsh.svg)", "", "## Compressor, level, block size", ""]
    lines += [sqsh_options.table(choices), ""]
    return "\n".join(lines)


def ratios(rows: dict[str, Row]) -> list[str]:
    def ratio(one: str, other: str, value: Callable[[Row], float]) -> float:
        return value(rows[one]) / value(rows[other])

    pairs = [
        (OTHERS, OURS),
        (ENROOT, REGISTRY),
        (TUNED, REGISTRY),
        (EXPORT, REGISTRY),
        (OURS, FLOOR),
        (OURS, ZSTD),
        (CHANGED, COPY),
        (CHANGED, OURS),
    ]
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

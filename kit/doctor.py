"""`./build.py doctor`: whether this machine has what the pipeline needs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import httpx
from pydantic import BaseModel, ConfigDict, RootModel

from kit.command import run
from kit.errors import CHECK_FAILED, KitError, UsageError
from kit.gpus import GpuError, gpu_access
from kit.layout import LOCKFILES, PROFILES, REPO, release, state_dir
from kit.lock import locks_of, pins
from kit.record import read_record
from kit.services import services_status
from kit.steps import say, size_text

Outcome = Literal["ok", "problem", "unknown"]
TOOLS = {
    "git": "--version",
    "mksquashfs": "-version",
    "mmdebstrap": "--version",
    "skopeo": "--version",
    "unsquashfs": "-version",
    "zstd": "--version",
}
"""Program → how it tells its version; ci/bootstrap.sh knows the packages that bring them."""
PEAK_BYTES = {"cpu": 22_000_000_000}
"""What `make demo` takes at its peak when cold, as far as it was measured."""
DEADLINE_S = 20.0
VERSION = re.compile(r"\d+(\.\d+)+")
CUDA_PACKAGE = "nvidia-cuda-cupti"
"""Its version is that of the CUDA that the environments were built for."""


class Finding(BaseModel):
    """What a check looked at and found; `next_step` is empty where nothing is to do."""

    model_config = ConfigDict(frozen=True)

    check: str
    result: Outcome
    looked_at: str
    found: str
    next_step: str = ""


class Findings(RootModel[list[Finding]]):
    pass


def examine_host(profile: str) -> Findings:
    """One finding and more a check; nothing is changed. Raises UsageError for a profile that there is not."""
    if profile not in PROFILES:
        raise UsageError(f"unknown profile '{profile}'", f"choose one of {', '.join(PROFILES)}")
    checks = (
        _tools(),
        _python(),
        _rights(),
        _kernel(),
        _disk(profile),
        _engine(),
        _registry(),
        _gpus(profile),
        _slurm(),
        _releases(),
    )
    return Findings([finding for check in checks for finding in check])


def say_findings(findings: Findings) -> int:
    """Each with what was looked at and the next step; the answer is the exit status."""
    for one in findings.root:
        mark = {"ok": "✓", "problem": "✗", "unknown": "?"}[one.result]
        say(f"{mark} {one.check}: {one.found}")
        say(f"    looked at: {one.looked_at}")
        if one.next_step:
            say(f"    next: {one.next_step}")
    return CHECK_FAILED if any(one.result == "problem" for one in findings.root) else 0


def _tools() -> Iterator[Finding]:
    missing = [name for name in TOOLS if shutil.which(name) is None]
    told = [f"{name} {_version(name)}" for name in TOOLS if name not in missing]
    looked = "PATH"
    if missing:
        step = "ci/bootstrap.sh --yes installs the Debian packages"
        yield Finding(
            check="tools", result="problem", looked_at=looked, found=f"missing: {', '.join(missing)}", next_step=step
        )
    else:
        yield Finding(check="tools", result="ok", looked_at=looked, found=", ".join(told))


def _version(name: str) -> str:
    finished = run([name, TOOLS[name]], check=False, timeout_s=DEADLINE_S)
    match = VERSION.search(finished.stdout + finished.stderr)
    return match[0] if match else "of an unknown version"


def _python() -> Iterator[Finding]:
    """The kit's own environment against its lock."""
    looked = f"{sys.prefix}, lockfiles/kit.txt"
    locked = pins(LOCKFILES / "kit.txt", f"{sys.version_info.major}.{sys.version_info.minor}")
    others = []
    for name, wanted in locked.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "missing"
        if found != wanted:
            others.append(f"{name} {found}, locked {wanted}")
    if others:
        yield Finding(
            check="Python environment",
            result="problem",
            looked_at=looked,
            found=f"{len(others)} of {len(locked)} packages differ: {'; '.join(others[:3])}",
            next_step="make env",
        )
    else:
        yield Finding(
            check="Python environment", result="ok", looked_at=looked, found=f"{len(locked)} packages as locked"
        )


def _rights() -> Iterator[Finding]:
    root = os.geteuid() == 0
    found = "root" if root else f"user {os.geteuid()}: the kit's own engine, base and runner need root"
    step = "" if root else "run image, sqsh and run as root; submit and verify need none"
    yield Finding(check="rights", result="ok" if root else "unknown", looked_at="user id", found=found, next_step=step)


def _kernel() -> Iterator[Finding]:
    systems = Path("/proc/filesystems").read_text().split()
    missing = [name for name in ("squashfs", "overlay") if name not in systems]
    if not Path("/dev/loop-control").exists():
        missing.append("/dev/loop-control")
    looked = "/proc/filesystems, /dev/loop-control"
    if missing:
        step = "modprobe them; without, ./build.py run cannot mount a squashfs"
        yield Finding(
            check="kernel", result="problem", looked_at=looked, found=f"missing: {', '.join(missing)}", next_step=step
        )
    else:
        found = f"Linux {os.uname().release} with squashfs, overlay and loop devices"
        yield Finding(check="kernel", result="ok", looked_at=looked, found=found)


def _disk(profile: str) -> Iterator[Finding]:
    place = REPO / "dist"
    free = shutil.disk_usage(place if place.exists() else REPO).free
    wanted = PEAK_BYTES.get(profile)
    looked = f"file system of {place}"
    if wanted is None:
        found = f"{size_text(free)} free; how much a build of {profile} takes at its peak was not measured"
        yield Finding(check="disk", result="unknown", looked_at=looked, found=found)
    elif free < wanted:
        found = f"{size_text(free)} free; a cold pipeline takes {size_text(wanted)} at its peak"
        step = "./build.py clean removes releases and caches; with inputs and base here, less is enough"
        yield Finding(check="disk", result="problem", looked_at=looked, found=found, next_step=step)
    else:
        found = f"{size_text(free)} free, {size_text(wanted)} are enough"
        yield Finding(check="disk", result="ok", looked_at=looked, found=found)


def _engine() -> Iterator[Finding]:
    """Looked at, not started: the first build prepares an engine of the kit's own where no other can build."""
    kind = state_dir() / "engine.kind"
    looked = f"{kind}, docker in PATH"
    if kind.exists() and kind.read_text().strip() == "own":
        running = "runs" if services_status()["engine"]["running"] else "is started on demand"
        found = f"the kit's own, unpacked in {state_dir()}; it {running}"
    elif shutil.which("docker") is not None:
        found = "the Docker that is installed here"
    else:
        found = "the first build unpacks one of its own"
    if os.geteuid() != 0 and "Docker" not in found:
        step = "run it as root, or install a Docker that can build (README)"
        yield Finding(check="image builder", result="problem", looked_at=looked, found=found, next_step=step)
    else:
        yield Finding(check="image builder", result="ok", looked_at=looked, found=found)


def _registry() -> Iterator[Finding]:
    """The one that IMAGE names; without, the kit's own."""
    image = os.environ.get("IMAGE", "")
    if not image:
        status = services_status()["registry"]
        found = f"the kit's own, {'at ' + str(status['address']) if status['running'] else 'started on demand'}"
        yield Finding(check="registry", result="ok", looked_at="IMAGE (not set)", found=found)
        return
    host = image.split("/")[0]
    for scheme in ("https", "http"):
        try:
            code = httpx.get(f"{scheme}://{host}/v2/", timeout=DEADLINE_S).status_code
        except httpx.HTTPError:
            continue
        good = code in (200, 401)
        found = f"{host} answers {code} over {scheme}" + (" and wants credentials" if code == 401 else "")
        step = "" if code == 200 else "skopeo login" if good else "see that this is a registry"
        outcome: Outcome = "ok" if good else "problem"
        yield Finding(check="registry", result=outcome, looked_at=f"{scheme}://{host}/v2/", found=found, next_step=step)
        return
    step = "its address, proxy and certificate authority; push and sqsh from oci/ need none"
    yield Finding(
        check="registry", result="problem", looked_at=f"https://{host}/v2/", found="no answer", next_step=step
    )


def _gpus(profile: str) -> Iterator[Finding]:
    """What a container would get, by the very code that gives it."""
    looked = "/proc/driver/nvidia, /dev/nvidia*, libcuda against the CUDA in the locks"
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    needed = _cuda_of(profile)
    if not Path("/dev/nvidiactl").exists():
        if needed is None:
            yield Finding(check="GPUs", result="ok", looked_at=looked, found="none, and this profile needs none")
        else:
            step = "image, push and sqsh work here; run the suite where a GPU is (make submit, ci/gpu_release.sh)"
            yield Finding(
                check="GPUs", result="problem", looked_at=looked, found="no NVIDIA driver is loaded", next_step=step
            )
        return
    wanted = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    if needed is not None:
        wanted["NVIDIA_REQUIRE_CUDA"] = f"cuda>={needed}"
    try:
        access = gpu_access(wanted, os.environ, Path("/"))
    except GpuError as error:
        step = "install the driver that fits, or reload its module"
        yield Finding(check="GPUs", result="problem", looked_at=looked, found=str(error), next_step=step)
        return
    found = f"{count} GPU(s), driver {_driver()}; a container gets {len(access.devices)} devices"
    yield Finding(check="GPUs", result="ok", looked_at=looked, found=found)


def _cuda_of(profile: str) -> str | None:
    """Major version of the CUDA that the profile's Dynamo environment is built for; nothing for one on CPU."""
    (dynamo, *_) = locks_of(profile)
    if dynamo.name.endswith("-cpu"):
        return None  # its packages name CUDA too, and use none
    found = pins(LOCKFILES / f"{dynamo.name}.txt", dynamo.python).get(CUDA_PACKAGE)
    return f"{found.split('.')[0]}.0" if found else None


def _driver() -> str:
    try:
        match = VERSION.search(Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return "unknown"
    return match[0] if match else "unknown"


def _slurm() -> Iterator[Finding]:
    if shutil.which("sbatch") is None:
        yield Finding(check="Slurm", result="ok", looked_at="PATH", found="not here; needed for `make submit` alone")
        return
    places = [os.environ.get("SLURM_CONF", ""), "/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf"]
    if not any(place and Path(place).exists() for place in places):
        found = "the commands are here, but no slurm.conf: they ask the network for one"
        yield Finding(check="Slurm", result="unknown", looked_at="SLURM_CONF, /etc/slurm, /run/slurm", found=found)
        return
    try:
        finished = run(["sinfo", "--noheader", "--format=%P %a %D"], check=False, timeout_s=DEADLINE_S)
    except KitError as error:
        yield Finding(
            check="Slurm", result="problem", looked_at="sinfo", found=error.what, next_step="is slurmctld up?"
        )
        return
    if finished.returncode:
        said = " ".join(finished.stderr.split())[-200:]
        yield Finding(check="Slurm", result="problem", looked_at="sinfo", found=said, next_step="is slurmctld up?")
    else:
        found = "; ".join(finished.stdout.splitlines()) or "no partition"
        yield Finding(check="Slurm", result="ok", looked_at="sinfo", found=found)


def _releases() -> Iterator[Finding]:
    """Whether each record has its files; their bytes are `verify`'s."""
    records = sorted((REPO / "dist").glob("*/record.json"))
    if not records:
        yield Finding(check="releases", result="ok", looked_at="dist", found="none yet")
    for path in records:
        made = release(path.parent.name)
        try:
            record = read_record(path)
        except KitError as error:
            yield Finding(
                check="releases", result="problem", looked_at=str(path), found=error.what, next_step=error.hint or ""
            )
            continue
        parts = {"oci/": made.oci, **({made.sqsh.name: made.sqsh} if record.sqsh else {})}
        gone = [name for name, part in parts.items() if not part.exists()]
        found = f"{made.name}: {'as recorded' if not gone else 'not here: ' + ', '.join(gone)}"
        yield Finding(
            check="releases",
            result="unknown" if gone else "ok",
            looked_at=str(path),
            found=found,
            next_step="make image sqsh, if it is needed here" if gone else "",
        )

"""What a container needs of this host to use its NVIDIA GPUs: device files, the driver's libraries and programs.

NVIDIA_VISIBLE_DEVICES, NVIDIA_DRIVER_CAPABILITIES, NVIDIA_REQUIRE_* and NVIDIA_DISABLE_REQUIRE mean what they mean to
enroot's hook 98-nvidia.sh and to NVIDIA's container toolkit, whose lists of libraries these follow. The first process
of a container imports this module, so it needs the standard library alone.
"""

from __future__ import annotations

import operator
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

NOT_ASKED = ("", "void")
UTILITY_LIBRARIES = ("libnvidia-ml", "libnvidia-cfg")
COMPUTE_LIBRARIES = (
    "libcuda", "libcudadebugger", "libnvidia-opencl", "libnvidia-gpucomp", "libnvidia-ptxjitcompiler",
    "libnvidia-allocator", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3", "libnvidia-nvvm", "libnvidia-nvvm70",
    "libnvidia-tileiras",
)  # fmt: skip
UTILITY_PROGRAMS = ("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nv-fabricmanager")
COMPUTE_PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
# Of these, every library with the driver's version in its name is bound.
OTHER_CAPABILITIES = ("graphics", "video", "display", "compat32")
CAPABILITIES = ("compute", "utility", *OTHER_CAPABILITIES)
SHARED_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-caps", "nvidia-caps-imex-channels")
DISPLAY_DEVICES = ("nvidia-modeset",)
SOCKETS = ("run/nvidia-persistenced/socket", "run/nvidia-fabricmanager")
CONDITION = re.compile(r"(\w+)(>=|<=|!=|=|>|<)([\w.]+)")
COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
ASK_DRIVER = """
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).cuDriverGetVersion(ctypes.byref(version))
print(version.value)
"""


class GpuError(Exception):
    """The GPUs that are asked for cannot be given."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}: {hint}")


@dataclass(frozen=True)
class Access:
    """What of the host a container gets: device files at their own paths; host path → path there, read-only, after
    which `ldconfig` must run there."""

    devices: list[str] = field(default_factory=list)
    read_only: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Driver:
    version: str
    folders: list[Path]  # where its libraries lie, the first that was found first

    @property
    def libcuda(self) -> Path:
        return next(path for folder in self.folders if (path := folder / f"libcuda.so.{self.version}").exists())


@dataclass(frozen=True)
class Gpu:
    minor: str  # N of /dev/nvidiaN
    uuid: str


def gpu_access(wanted: Mapping[str, str], caller: Mapping[str, str], root: Path, host: Path = Path("/")) -> Access:
    """What to bind for a container whose file system is at `root`.

    `wanted` are the image's variables; those of `caller` (the user's shell and command line) go before them. An image
    that asks for all GPUs starts without any on a host that has none. Raises GpuError.
    """
    asked = {**wanted, **{name: value for name, value in caller.items() if name.startswith("NVIDIA_")}}
    visible = asked.get("NVIDIA_VISIBLE_DEVICES", "")
    if visible in NOT_ASKED:
        return Access()
    if not (host / "dev/nvidiactl").exists():
        if visible in ("all", "none") or "NVIDIA_VISIBLE_DEVICES" not in caller:
            return Access()
        raise GpuError(
            f"NVIDIA_VISIBLE_DEVICES={visible}, but no NVIDIA driver is loaded here", "unset it, or load one"
        )
    capabilities = _capabilities(asked.get("NVIDIA_DRIVER_CAPABILITIES", ""))
    driver = _find_driver(host, caller.get("LD_LIBRARY_PATH", ""))
    if not asked.get("NVIDIA_DISABLE_REQUIRE"):
        _check_requirements(asked, driver)
    libraries = _library_folder(root)
    bound = {str(path): f"{libraries}/{path.name}" for path in _libraries(driver, capabilities)}
    bound |= {str(path): f"/usr/bin/{path.name}" for path in _programs(driver, capabilities, caller.get("PATH", ""))}
    bound |= {str(path): f"/{name}" for name in SOCKETS if (path := host / name).exists()}
    return Access(_devices(host, visible, capabilities), bound)


def _capabilities(text: str) -> set[str]:
    """Unset means `utility` alone, as with enroot's hook."""
    named = set(filter(None, text.split(","))) or {"utility"}
    unknown = named - {"all", *CAPABILITIES}
    if unknown:
        raise GpuError(
            f"NVIDIA_DRIVER_CAPABILITIES names '{min(unknown)}', which is none",
            f"choose from all, {', '.join(CAPABILITIES)}",
        )
    return set(CAPABILITIES) if "all" in named else named


def _find_driver(host: Path, library_path: str) -> Driver:
    """The user-space driver that belongs to the loaded kernel module: both must have the same version."""
    folders = list(dict.fromkeys([*_path_folders(library_path), *_cache_folders()]))
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.glob("libcuda.so.*.*")):
            found.setdefault(path.name.removeprefix("libcuda.so."), []).append(folder)
    if not found:
        raise GpuError(
            "no libcuda.so.VERSION in the ldconfig cache or the folders of LD_LIBRARY_PATH",
            "install the driver's libraries, or run ldconfig",
        )
    loaded = _kernel_module(host)
    if loaded is not None and loaded not in found:
        raise GpuError(
            f"the driver's kernel module is {loaded}, its libraries are {', '.join(found)}",
            "reboot, or reload the module",
        )
    version = loaded or next(iter(found))
    return Driver(version, [*found[version], *(folder for folder in folders if folder not in found[version])])


def _path_folders(text: str) -> Iterator[Path]:
    return (Path(word).resolve() for word in text.split(":") if word.startswith("/") and Path(word).is_dir())


def _cache_folders() -> Iterator[Path]:
    """Folders of the libraries in the loader's cache that are for this processor."""
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    kind = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(platform.machine(), "")
    answer = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    for line in answer.splitlines():
        name, _, path = line.partition(" => ")
        if kind in name and ("nvidia" in name or "libcuda." in name):
            yield Path(path).resolve().parent


def _kernel_module(host: Path) -> str | None:
    try:
        text = (host / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module\b[^\d]*(?:x86_64|aarch64)?\s+([\d.]+)", text)
    return found[1] if found else None


def _check_requirements(asked: Mapping[str, str], driver: Driver) -> None:
    """Each NVIDIA_REQUIRE_*: alternatives apart by spaces, each a list of conditions apart by commas."""
    facts = {"driver": _number(driver.version)}
    for name in sorted(asked):
        if not name.startswith("NVIDIA_REQUIRE_") or not asked[name].strip():
            continue
        if "cuda" not in facts:
            facts["cuda"] = _cuda_version(driver.libcuda)
        if not any(_holds(alternative, facts) for alternative in asked[name].split()):
            cuda = ".".join(map(str, facts["cuda"]))
            raise GpuError(
                f"the image needs {asked[name]}, but this machine's driver {driver.version} serves CUDA {cuda}",
                "update the driver, or set NVIDIA_DISABLE_REQUIRE=1 to try",
            )


def _holds(conditions: str, facts: Mapping[str, tuple[int, ...]]) -> bool:
    """Conditions on anything but CUDA and the driver (brand, arch) are left to CUDA itself."""
    for condition in conditions.split(","):
        parsed = CONDITION.fullmatch(condition)
        if parsed is None:
            raise GpuError(f"'{condition}' in NVIDIA_REQUIRE_… is no condition", "write such as cuda>=13.0")
        name, compare, value = parsed.groups()
        if name in facts:
            wanted = _number(value)
            if not COMPARE[compare](facts[name][: len(wanted)], wanted):
                return False
    return True


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _cuda_version(libcuda: Path) -> tuple[int, ...]:
    """The newest CUDA that the driver serves. Asked in a process of its own, which the library cannot outlive."""
    command = [sys.executable, "-I", "-S", "-c", ASK_DRIVER, str(libcuda)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise GpuError(f"{libcuda} cannot be loaded ({answer.stderr.strip()[-200:]})", "install the driver anew")
    number = int(answer.stdout)
    return number // 1000, number % 1000 // 10


def _library_folder(root: Path) -> str:
    """Where the image's loader looks."""
    candidates = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib")
    return next(folder for folder in candidates if folder == candidates[-1] or (root / folder[1:]).is_dir())


def _libraries(driver: Driver, capabilities: set[str]) -> Iterator[Path]:
    names = {
        *(UTILITY_LIBRARIES if "utility" in capabilities else ()),
        *(COMPUTE_LIBRARIES if "compute" in capabilities else ()),
    }
    all_of_them = not capabilities.isdisjoint(OTHER_CAPABILITIES)
    seen: set[str] = set()
    for folder in driver.folders:
        for path in sorted(folder.iterdir()):
            stem = path.name.partition(".so.")[0]
            # Not every library has the driver's version (libnvidia-nvvm.so.4 is a link to one that has).
            fits = path.name.endswith(f".so.{driver.version}") and (all_of_them or stem in names)
            if fits and path.name not in seen and not path.is_dir():
                seen.add(path.name)
                yield path


def _programs(driver: Driver, capabilities: set[str], path: str) -> Iterator[Path]:
    beside = [folder.parent / "bin" for folder in driver.folders]
    names: Iterable[str] = (
        *(UTILITY_PROGRAMS if "utility" in capabilities else ()),
        *(COMPUTE_PROGRAMS if "compute" in capabilities else ()),
    )
    for name in names:
        found = shutil.which(name, path=os.pathsep.join([*map(str, beside), path or os.defpath]))
        if found:
            yield Path(found).resolve()


def _devices(host: Path, visible: str, capabilities: set[str]) -> list[str]:
    present = {path.name for path in (host / "dev").iterdir()}
    gpus = _gpus(host, present)
    chosen = (
        gpus if visible == "all" else [] if visible == "none" else [_gpu(word, gpus) for word in visible.split(",")]
    )
    shared = [*SHARED_DEVICES, *([] if capabilities.isdisjoint(("graphics", "display")) else DISPLAY_DEVICES)]
    names = [*(name for name in shared if name in present), *(f"nvidia{gpu.minor}" for gpu in chosen)]
    return [f"/dev/{name}" for name in dict.fromkeys(names)]


def _gpus(host: Path, present: set[str]) -> list[Gpu]:
    """In the order in which nvidia-smi counts them: by bus address, as the kernel module's folders are named."""
    found = []
    for folder in sorted((host / "proc/driver/nvidia/gpus").glob("*")):
        facts = dict(
            re.findall(r"^(GPU UUID|Device Minor):\s*(\S+)", (folder / "information").read_text(), re.MULTILINE)
        )
        if f"nvidia{facts.get('Device Minor')}" in present:
            found.append(Gpu(facts["Device Minor"], facts.get("GPU UUID", "")))
    if found:
        return found
    minors = sorted(int(name[6:]) for name in present if re.fullmatch(r"nvidia\d+", name))
    return [Gpu(str(minor), "") for minor in minors]


def _gpu(word: str, gpus: list[Gpu]) -> Gpu:
    """The GPU of an index, an index with a MIG slice behind a colon, or (the start of) a UUID."""
    index = word.partition(":")[0]
    if index.isdigit() and int(index) < len(gpus):
        return gpus[int(index)]
    for gpu in gpus:
        if word.startswith("GPU-") and gpu.uuid.startswith(word):
            return gpu
    if word.startswith("MIG-") and gpus:
        raise GpuError(f"NVIDIA_VISIBLE_DEVICES names '{word}'", "name a MIG slice GPU:SLICE here, say 0:1")
    raise GpuError(
        f"NVIDIA_VISIBLE_DEVICES names '{word}', but this machine has {len(gpus)} GPUs", "nvidia-smi -L lists them"
    )

"""What a container gets of a host's GPUs, against folders laid out as a driver lays out a host.

On real GPUs ci/gpu_release.sh runs the whole suite through it; docs/evidence/gpu says when that was done last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kit import gpus
from kit.gpus import GpuError, gpu_access
from kit.layout import LOCKFILES, REPO

pytestmark = pytest.mark.unit

LIBRARIES = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libEGL_nvidia")
IMAGE = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
UUIDS = ("GPU-1111aaaa-0000", "GPU-2222bbbb-0000")


class Host:
    """A machine with two GPUs whose minor numbers are in the other order than their bus addresses."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.image = root / "image"
        (self.image / "usr/lib/x86_64-linux-gnu").mkdir(parents=True)
        for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia0", "nvidia1", "null"):
            self.write(f"dev/{name}")
        for bus, minor, uuid in (("0000:03:00.0", 1, UUIDS[0]), ("0000:82:00.0", 0, UUIDS[1])):
            text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
            self.write(f"proc/driver/nvidia/gpus/{bus}/information", text)
        self.load("580.1.2")
        self.driver("580.1.2")

    def write(self, name: str, text: str = "") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def load(self, version: str) -> None:
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\nGCC version: 12\n"
        self.write("proc/driver/nvidia/version", text)

    def driver(self, version: str) -> Path:
        folder = self.root / f"driver-{version}" / "lib64"
        for library in LIBRARIES:
            self.write(f"driver-{version}/lib64/{library}.so.{version}")
        smi = self.write(f"driver-{version}/bin/nvidia-smi")
        smi.chmod(0o755)
        return folder

    def access(self, *folders: str, image: Mapping[str, str] = IMAGE, **caller: str) -> gpus.Access:
        path = ":".join(str(self.root / f"driver-{version}/lib64") for version in folders or ("580.1.2",))
        return gpu_access(image, {"LD_LIBRARY_PATH": path, "PATH": "", **caller}, self.image, self.root)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(gpus, "_cache_folders", list)
    monkeypatch.setattr(gpus, "_cuda_version", lambda libcuda: (13, 0))
    return Host(tmp_path)


def names(access: gpus.Access) -> set[str]:
    return {Path(target).name for target in access.read_only.values()}


def test_devices_libraries_and_programs(host: Host) -> None:
    access = host.access()
    assert access.devices == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia0"]
    assert names(access) == {f"{library}.so.580.1.2" for library in LIBRARIES[:4]} | {"nvidia-smi"}
    places = {str(Path(target).parent) for target in access.read_only.values()}
    assert places == {"/usr/lib/x86_64-linux-gnu", "/usr/bin"}


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("all", ["nvidia1", "nvidia0"]),
        ("0", ["nvidia1"]),
        ("1", ["nvidia0"]),
        ("1,0", ["nvidia0", "nvidia1"]),
        ("0:0", ["nvidia1"]),
        (UUIDS[1], ["nvidia0"]),
        ("GPU-1111", ["nvidia1"]),
        ("none", []),
    ],
)
def test_visible_devices(host: Host, visible: str, devices: list[str]) -> None:
    access = host.access(NVIDIA_VISIBLE_DEVICES=visible)
    assert access.devices[2:] == [f"/dev/{device}" for device in devices]
    assert names(access) >= {"libcuda.so.580.1.2"}


@pytest.mark.parametrize("image", [{}, {"NVIDIA_VISIBLE_DEVICES": ""}, {"NVIDIA_VISIBLE_DEVICES": "void"}])
def test_an_image_that_asks_for_no_gpu(host: Host, image: dict[str, str]) -> None:
    assert host.access(image=image) == gpus.Access()
    assert host.access(image=image, NVIDIA_VISIBLE_DEVICES="0").devices[2:] == ["/dev/nvidia1"]


@pytest.mark.parametrize(
    ("capabilities", "bound"),
    [
        ("utility", {"libnvidia-ml.so.580.1.2", "nvidia-smi"}),
        ("", {"libnvidia-ml.so.580.1.2", "nvidia-smi"}),
        ("compute", {f"{library}.so.580.1.2" for library in ("libcuda", *LIBRARIES[2:4])}),
        ("all", {f"{library}.so.580.1.2" for library in LIBRARIES} | {"nvidia-smi"}),
        ("graphics", {f"{library}.so.580.1.2" for library in LIBRARIES}),
    ],
)
def test_capabilities(host: Host, capabilities: str, bound: set[str]) -> None:
    access = host.access(NVIDIA_DRIVER_CAPABILITIES=capabilities)
    assert names(access) == bound
    assert ("/dev/nvidia-modeset" in access.devices) == (capabilities in ("all", "graphics"))


def test_the_libraries_that_belong_to_the_kernel_module(host: Host) -> None:
    host.driver("570.9")
    assert names(host.access("570.9", "580.1.2")) == {f"{library}.so.580.1.2" for library in LIBRARIES[:4]} | {
        "nvidia-smi"
    }
    with pytest.raises(GpuError, match=r"kernel module is 580\.1\.2, its libraries are 570\.9: reboot, or reload"):
        host.access("570.9")


def test_without_proc_the_first_driver_and_the_device_files_count(host: Host) -> None:
    """As in a sandbox that hides /proc/driver."""
    for path in sorted((host.root / "proc").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert host.access(NVIDIA_VISIBLE_DEVICES="1").devices[2:] == ["/dev/nvidia1"]


@pytest.mark.parametrize(
    ("caller", "message"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "2"}, r"names '2', but this machine has 2 GPUs"),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-3"}, r"names 'GPU-3'"),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-1"}, r"name a MIG slice GPU:SLICE"),
        ({"NVIDIA_DRIVER_CAPABILITIES": "compute,ngx"}, r"names 'ngx', which is none: choose from all, compute"),
        ({"NVIDIA_REQUIRE_CUDA": "cuda => 13"}, r"'cuda' in NVIDIA_REQUIRE_… is no condition"),
    ],
)
def test_refused(host: Host, caller: dict[str, str], message: str) -> None:
    with pytest.raises(GpuError, match=message):
        host.access(image={**IMAGE, **caller})


def test_no_driver(host: Host) -> None:
    (host.root / "dev/nvidiactl").unlink()
    assert host.access() == gpus.Access()
    with pytest.raises(GpuError, match="NVIDIA_VISIBLE_DEVICES=1, but no NVIDIA driver is loaded here"):
        host.access(NVIDIA_VISIBLE_DEVICES="1")


def test_no_libraries(host: Host) -> None:
    with pytest.raises(GpuError, match=r"no libcuda.so.VERSION in the ldconfig cache"):
        host.access("not there")


@pytest.mark.parametrize(
    ("requirement", "holds"),
    [
        ("cuda>=13.0", True),
        ("cuda>=13", True),
        ("cuda>=12.4", True),
        ("cuda>=13.1", False),
        ("cuda>=13.1 brand=tesla,driver>=580,driver<581", True),
        ("cuda>=13.1 brand=tesla,driver>=570,driver<571", False),
        ("driver>=580.1.3", False),
    ],
)
def test_the_driver_must_serve_the_images_cuda(host: Host, requirement: str, holds: bool) -> None:
    image = {**IMAGE, "NVIDIA_REQUIRE_CUDA": requirement}
    if holds:
        assert host.access(image=image).devices
        return
    with pytest.raises(GpuError, match=r"driver 580\.1\.2 serves CUDA 13\.0: update the driver, or set NVIDIA_DISABLE"):
        host.access(image=image)
    assert host.access(image=image, NVIDIA_DISABLE_REQUIRE="1").devices


def test_the_image_requires_the_locked_cuda() -> None:
    locked = next(line for line in (LOCKFILES / "dynamo-cuda.txt").read_text().splitlines() if "cuda-runtime==" in line)
    version = locked.partition("==")[2].partition(" ")[0]
    wanted = f"NVIDIA_REQUIRE_CUDA=cuda>={'.'.join(version.split('.')[:2])} "
    assert wanted in (REPO / "docker/Dockerfile").read_text()

"""The first process of a container: sets up its file system, starts the command, reaps, and returns its exit status.

Runs in fresh mount, PID, IPC and UTS namespaces (see kit/run.py), on the standard library and kit/gpus.py alone. Every
mount lies in the private mount namespace, and this process ends as soon as the pipe from the runner closes, so the
kernel undoes everything, however the runner ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypedDict

from kit.gpus import Access, GpuError, gpu_access

# From <sys/mount.h> and <linux/sockios.h>.
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

SETUP_FAILED = 125
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
REFERENCE = rf"\$\{{({VARIABLE})\}}"  # what enroot replaces by the caller's variable
DEVICES = re.compile(r"null|zero|full|random|urandom|tty|fuse|gdrdrv|infiniband")
LDCONFIG = "/sbin/ldconfig"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ISOLATED_HOSTNAME = "container"


class Mount(TypedDict):
    source: str
    target: str
    read_only: bool


class Spec(TypedDict):
    """What the runner asks for; JSON in an inherited file."""

    squashfs: str
    base: str  # a folder to mount on; its content on the host is not changed
    rootless: bool  # in a user namespace, where fewer mounts are allowed
    unpacked: str | None  # a folder with the squashfs's content, to be the root itself
    mounts: list[Mount]
    env: dict[str, str]
    command: list[str]
    host_network: bool  # else a loopback of its own and nothing more
    interactive: bool  # the command gets the terminal


def main() -> NoReturn:
    spec_file, control, report = (int(word) for word in sys.argv[1:])
    for handle in (spec_file, control, report):
        os.set_inheritable(handle, False)
    try:
        spec: Spec = json.loads(os.pread(spec_file, os.fstat(spec_file).st_size, 0))
        if not spec["host_network"]:
            raise_loopback()
        enter_root(spec)
        command = start_command(spec)  # held to the end: see there
    except (OSError, ValueError, GpuError, subprocess.CalledProcessError) as error:
        os.write(report, reason(error).encode())
        os._exit(SETUP_FAILED)
    threading.Thread(target=pass_signals_on, args=(control, command.pid), daemon=True).start()
    os._exit(reap_until_end(command.pid, keep_running=spec["interactive"]))


def enter_root(spec: Spec) -> None:
    """Mount the squashfs under an overlay in memory and make that the root; the host's tree cannot be reached then."""
    mount("tmpfs", spec["base"], "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.chdir(spec["base"])
    for folder in ("lower", "upper", "work", "root"):
        Path(folder).mkdir()
    if spec["unpacked"]:
        mount(spec["unpacked"], "root", "", MS_BIND)
    else:
        mount_squashfs(spec["squashfs"], rootless=spec["rootless"])

    caller = {**os.environ, **spec["env"]}
    gpus = gpu_access(image_environment(Path("root/etc/environment")), caller, Path("root"))
    with held_paths() as host:
        devices = sorted(str(path) for path in Path("/dev").iterdir() if DEVICES.fullmatch(path.name))
        binds = [Mount(source=device, target=device, read_only=False) for device in [*devices, *gpus.devices]]
        binds += [Mount(source=source, target=target, read_only=True) for source, target in gpus.read_only.items()]
        if spec["interactive"]:
            binds.append(Mount(source=os.ttyname(0), target="/dev/console", read_only=False))
        if spec["host_network"]:
            binds.append(Mount(source="/sys", target="/sys", read_only=True))
        if Path("/sys/fs/cgroup").is_dir():
            binds.append(Mount(source="/sys/fs/cgroup", target="/sys/fs/cgroup", read_only=False))
        binds += spec["mounts"]
        opened = [(host(bind["source"]), bind) for bind in binds]
        texts = network_files(host_network=spec["host_network"])

        os.chdir("root")
        call("syscall", PIVOT_ROOT[os.uname().machine], b".", b".")
        # The host's root is now mounted over ours: no path leads to it, but its mounts can still be bound.
        make_system_mounts(fresh_sys=not spec["host_network"], rootless=spec["rootless"])
        for source, bind in opened:
            bind_mount(source, bind["target"], read_only=bind["read_only"], rootless=spec["rootless"])
        for path, text in texts.items():
            write_file(path, text)
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")
    if gpus.read_only:
        register_libraries(gpus)


def register_libraries(gpus: Access) -> None:
    """Make the loader find the driver's libraries, under the names that programs load them by."""
    if not Path(LDCONFIG).exists():
        raise GpuError(
            f"the image has no {LDCONFIG} to register the driver's libraries", "set NVIDIA_VISIBLE_DEVICES=void"
        )
    subprocess.run([LDCONFIG], check=True, capture_output=True, text=True)
    for target in gpus.read_only.values():
        # Some programs load `libcuda.so`, which ldconfig does not make.
        if target.partition(".so.")[0].endswith("/libcuda"):
            link = Path(target).with_name("libcuda.so")
            link.unlink(missing_ok=True)
            link.symlink_to("libcuda.so.1")


def mount_squashfs(squashfs: str, *, rootless: bool) -> None:
    """At `root`, under an overlay; in the folder that is current."""
    if rootless:
        subprocess.run(["squashfuse", squashfs, "lower"], check=True, capture_output=True, text=True)
    else:
        # mount(8) finds a free loop device and has it vanish with its last user.
        loop = ["mount", "-t", "squashfs", "-o", "loop,ro,nodev", squashfs, "lower"]
        subprocess.run(loop, check=True, capture_output=True, text=True)
    options = "lowerdir=lower,upperdir=upper,workdir=work" + (",userxattr" if rootless else "")
    mount("overlay", "root", "overlay", MS_NODEV, options)


def make_system_mounts(*, fresh_sys: bool, rootless: bool) -> None:
    Path("/tmp").mkdir(mode=0o1777, exist_ok=True)
    system = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("proc", "/proc", "proc", system)
    if fresh_sys:  # the host's would show network devices that are not here
        mount("sysfs", "/sys", "sysfs", system | MS_RDONLY)
    mount("tmpfs", "/dev", "tmpfs", MS_NOSUID, "mode=755,size=1m")
    terminals = "newinstance,ptmxmode=0666,mode=620" + ("" if rootless else ",gid=5")  # a user's only group is 0
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    mount("mqueue", "/dev/mqueue", "mqueue", system)
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        Path("/dev", name).symlink_to(target)


@contextmanager
def held_paths() -> Iterator[Callable[[str], int]]:
    """Opens host paths, to be bound once the root is another; closes them at the end, as they pin the host's mounts."""
    handles: list[int] = []

    def hold(path: str) -> int:
        handles.append(os.open(path, os.O_PATH))
        return handles[-1]

    try:
        yield hold
    finally:
        for handle in handles:
            os.close(handle)


def bind_mount(source: int, target: str, *, read_only: bool, rootless: bool) -> None:
    place = Path(target)
    if Path(f"/proc/self/fd/{source}").is_dir():
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    if rootless and read_only:
        # A user namespace can neither leave out what is mounted below a source, nor drop a mount's other flags.
        mount(f"/proc/self/fd/{source}", target, "", MS_BIND | MS_REC)
        attributes = struct.pack("=4Q", MOUNT_ATTR_RDONLY, 0, 0, 0)
        words = (MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, len(attributes))
        call("syscall", *words, about=target)
        return
    # A read-only flag holds for one mount alone, so what is mounted below a read-only source stays out.
    mount(f"/proc/self/fd/{source}", target, "", MS_BIND | (0 if read_only else MS_REC))
    if read_only:
        mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY)


def network_files(*, host_network: bool) -> dict[str, str]:
    if host_network:
        return {path: Path(path).read_text() for path in ("/etc/hosts", "/etc/resolv.conf") if Path(path).exists()}
    socket.sethostname(ISOLATED_HOSTNAME)
    return {"/etc/hosts": f"127.0.0.1 localhost {ISOLATED_HOSTNAME}\n::1 localhost\n"}


def write_file(path: str, text: str) -> None:
    place = Path(path)
    place.unlink(missing_ok=True)  # in many images a link to a file that is not there
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack_from("h", fcntl.ioctl(probe, SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def start_command(spec: Spec) -> subprocess.Popen[bytes]:
    """Start `/etc/rc` with the command, as enroot does, or the command itself in an image without one.

    Whoever drops the answer loses the exit status of a command that has ended by then: Popen reaps it.
    """
    start = ["/bin/sh", "/etc/rc"] if Path("/etc/rc").exists() else []
    words = [*start, *spec["command"]] or ["/bin/sh"]
    env = {"PATH": DEFAULT_PATH, "HOME": "/root", **image_environment(Path("/etc/environment")), **spec["env"]}
    # A caller may have been started in the background, where shells have these two ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if spec["interactive"]:
        return subprocess.Popen(words, env=env, process_group=0, preexec_fn=take_terminal)
    return subprocess.Popen(words, env=env, start_new_session=True)


def take_terminal() -> None:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)


def image_environment(path: Path) -> dict[str, str]:
    """`/etc/environment` as enroot reads it: raw lines, `${NAME}` from the caller, two pairs of quotes removed."""
    variables: dict[str, str] = {}
    text = path.read_bytes().decode(errors="surrogateescape") if path.is_file() else ""
    for line in text.split("\n"):
        filled = re.sub(REFERENCE, lambda found: os.environ.get(found[1], ""), line.lstrip())
        if found := re.fullmatch(rf"({VARIABLE})=(.*)", filled, re.DOTALL):
            variables[found[1]] = without_quotes(without_quotes(found[2]))
    return variables


def without_quotes(value: str) -> str:
    found = re.fullmatch(r"[\"'](.*)[\"']\s*", value, re.DOTALL)
    return found[1] if found else value


def pass_signals_on(control: int, child: int) -> None:
    """Each line of `control` is a signal for the command; the end of the file means that the runner is gone."""
    with os.fdopen(control) as lines:
        for line in lines:
            number = int(line)
            try:
                # What a terminal would send reaches the whole group, as from a terminal.
                if number in (signal.SIGINT, signal.SIGQUIT):
                    os.killpg(child, number)
                else:
                    os.kill(child, number)
            except ProcessLookupError:
                pass
    os._exit(128 + signal.SIGKILL)


def reap_until_end(child: int, *, keep_running: bool) -> int:
    """Exit status of the command, 128 + N if signal N ended it. All else that ends is an orphan and only reaped."""
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED if keep_running else 0)
        if pid != child:
            continue
        if os.WIFSTOPPED(status):  # after Ctrl-Z no shell outside could continue it
            os.killpg(child, signal.SIGCONT)
            continue
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{error.cmd[0]}: {error.stderr.strip()}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return str(error)


libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    if kind:  # a new file system needs a mount point; bind_mount makes its own
        Path(target).mkdir(parents=True, exist_ok=True)
    call("mount", source.encode(), os.fsencode(target), kind.encode(), flags, data.encode(), about=target)


def call(name: str, *arguments: bytes | int, about: str = "") -> None:
    words = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in arguments]
    if getattr(libc, name)(*words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} failed, {os.strerror(number)}", about or None)

"""The runner: what the command sees, what its end tells us, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.kit.conftest import Kit, convert_layout
from tests.kit.test_enroot_files import HOSTILE
from tests.kit.tiny_image import busybox, folder, symlink, write_layout

pytestmark = [
    pytest.mark.sqsh,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a squashfs needs root"),
    pytest.mark.usefixtures("nothing_left"),
]


# The first process of a container, but for its root, with a command that has ended before anybody looks.
ENDED_ALREADY = """
import json, os, subprocess, sys, tempfile
from kit import container_init

class Ended(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

subprocess.Popen = Ended
container_init.enter_root = lambda spec: None
spec, report, pipe = tempfile.TemporaryFile(), tempfile.TemporaryFile(), os.pipe()
wanted = {"command": ["sh", "-c", "exit 7"], "env": {}, "host_network": True, "interactive": False}
spec.write(json.dumps(wanted).encode())
spec.flush()
sys.argv[1:] = [str(handle) for handle in (spec.fileno(), pipe[0], report.fileno())]
container_init.main()
"""


def shell(kit: Kit, squashfs: Path, script: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return kit("run", "--engine", "own", "--sqsh", squashfs, *options, "--", "sh", "-c", script)


def shown(kit: Kit, squashfs: Path, script: str, *options: str | Path) -> str:
    finished = shell(kit, squashfs, script, *options)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_status_of_a_command_that_ends_at_once_is_not_lost(kit: Kit) -> None:
    finished = subprocess.run([sys.executable, "-c", ENDED_ALREADY], cwd=kit.root, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (7, "")


class TestInside:
    def test_environment_is_the_images_and_ours_only_where_asked(self, kit: Kit, tiny: Path, monkeypatch) -> None:
        monkeypatch.setenv("ON_HOST", "leak")
        monkeypatch.setenv("HANDED_ON", "a b")
        text = shown(kit, tiny, "env", "--env", "HANDED_ON", "--env", "FROM_IMAGE=no", "--env", "X=$(id)\n`id`")
        assert "HANDED_ON=a b\n" in text
        assert "FROM_IMAGE=no\n" in text
        assert "X=$(id)\n`id`\n" in text
        assert "HOME=/root\n" in text
        assert "ON_HOST" not in text

    def test_hostile_configuration_arrives_whole_and_runs_nothing(self, kit: Kit, tmp_path: Path) -> None:
        wanted = {name: value.replace("{marker}", "/executed") for name, value in HOSTILE.items()}
        config = {
            "Env": [f"{name}={value}" for name, value in wanted.items()],
            "WorkingDir": "/w `touch /executed`\n$(touch /executed)",
            "Labels": {"x": "y\ntouch /executed"},
            "Entrypoint": ["/bin/sh", "-c", 'cat /proc/self/environ; ls -d /executed; printf "|%s" "$PWD" "$@"', "--"],
            "Cmd": ["it's", "$(touch /executed)", "`touch /executed`\n"],
        }
        write_layout(tmp_path / "oci", [busybox("printf")], config, docker=True)
        squashfs = convert_layout(tmp_path / "oci", tmp_path / "hostile.sqsh")
        finished = kit("run", "--engine", "own", "--sqsh", squashfs)
        entries, _, words = finished.stdout.rpartition("\0")
        found = dict(entry.split("=", 1) for entry in entries.split("\0"))
        assert {name: found.get(name) for name in wanted} == wanted
        assert "INJECTED" not in found
        assert words == "|/w `touch /executed`\n$(touch /executed)|it's|$(touch /executed)|`touch /executed`\n"
        assert "/executed: No such file" in finished.stderr

    def test_root_is_writable_and_forgets(self, kit: Kit, tiny: Path) -> None:
        assert (
            shown(kit, tiny, "echo x > /new && rm /bin/ls && cat /new && test -e /bin/ls || echo gone") == "x\ngone\n"
        )
        assert shown(kit, tiny, "ls / | grep new || echo none", "--network", "none").endswith("none\n")

    def test_host_is_out_of_sight(self, kit: Kit, tiny: Path) -> None:
        mounts = shown(kit, tiny, "cat /proc/self/mountinfo")
        assert str(kit.root) not in mounts
        assert "squashfs" not in mounts
        processes = shown(kit, tiny, "ls -d /proc/[0-9]*").split()
        assert len(processes) <= 3, "first process, shell, ls"

    def test_devices_and_shared_memory(self, kit: Kit, tiny: Path) -> None:
        script = (
            "echo x >/dev/null && test -c /dev/urandom -a -d /dev/pts && echo y > /dev/shm/a && ls /dev/shm /dev/fd/0"
        )
        assert shown(kit, tiny, script) == "/dev/fd/0\n\n/dev/shm:\na\n"
        assert not Path("/dev/shm/a").exists()

    def test_no_network_but_a_loopback(self, kit: Kit, tiny: Path) -> None:
        text = shown(
            kit,
            tiny,
            "ls /sys/class/net; cat /sys/class/net/lo/operstate /sys/class/net/lo/flags /etc/hosts",
            "--network",
            "none",
        )
        assert text.split()[:3] == ["lo", "unknown", "0x9"]  # up, and a loopback
        assert "127.0.0.1 localhost" in text

    def test_host_network_is_the_hosts(self, kit: Kit, tiny: Path) -> None:
        inside = shown(kit, tiny, "stat -L -c %i /proc/self/ns/net")
        assert int(inside) == Path("/proc/self/ns/net").stat().st_ino

    def test_image_without_start_files(self, kit: Kit, tmp_path: Path) -> None:
        for entry in busybox():
            place = tmp_path / "tree" / entry.name
            place.parent.mkdir(parents=True, exist_ok=True)
            if entry.type == b"5":
                place.mkdir(exist_ok=True)
            elif entry.link:
                place.symlink_to(entry.link)
            else:
                place.write_bytes(entry.data)
                place.chmod(entry.mode)
        subprocess.run(["mksquashfs", tmp_path / "tree", tmp_path / "bare.sqsh", "-quiet", "-no-progress"], check=True)
        assert shown(kit, tmp_path / "bare.sqsh", "echo $PATH").startswith("/usr/local/sbin:")


class TestMounts:
    def test_folder_both_ways_and_read_only(self, kit: Kit, tiny: Path, tmp_path: Path) -> None:
        results, data = tmp_path / "results", tmp_path / "data, with=odd chars"
        results.mkdir()
        data.mkdir()
        (data / "file").write_text("in")
        options = (
            "--mount",
            f"{results}:/deep/er/results",
            "--mount",
            f"{data}:/data:ro",
            "--mount",
            f"{data}/file:/etc/one",
        )
        script = "cat /data/file /etc/one > /deep/er/results/out; touch /data/x 2>&1"
        finished = shell(kit, tiny, script, *options)
        assert finished.returncode == 1
        assert "Read-only file system" in finished.stdout
        assert (results / "out").read_text() == "inin"

    def test_target_behind_a_link_stays_inside(self, kit: Kit, tmp_path: Path) -> None:
        write_layout(
            tmp_path / "oci", [[*busybox(), folder("real"), symlink("way", "/real"), symlink("out", "/escape")]]
        )
        squashfs = convert_layout(tmp_path / "oci", tmp_path / "links.sqsh")
        (tmp_path / "data").mkdir()
        (tmp_path / "data/file").write_text("x")
        assert shown(kit, squashfs, "ls /real/in", "--mount", f"{tmp_path}/data:/way/in") == "file\n"
        dangling = shell(kit, squashfs, "true", "--mount", f"{tmp_path}/data:/out/in")
        assert dangling.stderr == "error: the container could not start: File exists: /out\n"
        assert not Path("/escape").exists()

    @pytest.mark.parametrize("text", ["nonsense", "/tmp", "/tmp:relative", "/tmp:/x:rx", "/nowhere:/x", ":/x"])
    def test_nonsense_is_refused(self, kit: Kit, tiny: Path, text: str) -> None:
        finished = kit("run", "--sqsh", tiny, "--mount", text, "--", "true")
        assert finished.returncode == 2
        assert finished.stderr.startswith(f"error: cannot mount '{text}'")


class TestEnds:
    @pytest.mark.parametrize("status", [0, 1, 7, 125, 255])
    def test_exit_status(self, kit: Kit, tiny: Path, status: int) -> None:
        assert shell(kit, tiny, f"exit {status}").returncode == status

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
    def test_ended_by_a_signal(self, kit: Kit, tiny: Path, number: signal.Signals) -> None:
        assert shell(kit, tiny, f"kill -{number} $$").returncode == 128 + number

    def test_command_that_is_not_there(self, kit: Kit, tiny: Path) -> None:
        assert kit("run", "--engine", "own", "--sqsh", tiny, "--", "/no/such").returncode == 127

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
    def test_signals_reach_the_command(self, kit: Kit, tiny: Path, number: signal.Signals) -> None:
        script = f"trap 'echo got; exit 9' {number}; echo ready; while :; do sleep 0.05; done"
        process = started(kit, tiny, script)
        process.send_signal(number)
        assert process.communicate(timeout=20)[0] == "got\n"
        assert process.returncode == 9

    def test_a_command_that_does_not_listen_is_killed_with_the_runner(self, kit: Kit, tiny: Path) -> None:
        process = started(kit, tiny, "trap '' TERM INT; (trap '' TERM INT; sleep 3600) & echo ready; wait; sleep 3600")
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        inside = descendants(process.pid)
        assert len(inside) >= 4, "unshare, the first process, the command, its child"
        process.kill()
        process.communicate(timeout=20)
        assert gone(inside)

    def test_its_children_end_with_it(self, kit: Kit, tiny: Path) -> None:
        shell(kit, tiny, "for i in 1 2 3 4 5; do sleep 3599 & done; exit 0")
        assert not [line for line in command_lines() if "sleep\x003599" in line]

    def test_orphans_are_reaped(self, kit: Kit, tiny: Path) -> None:
        script = (
            "for i in 1 2 3 4 5 6; do (sleep 0.01 & ); done; sleep 0.5; cat /proc/[0-9]*/status | grep -c 'State:.Z'"
        )
        assert shell(kit, tiny, script).stdout == "0\n"

    def test_kill_of_the_own_group_does_not_reach_us(self, kit: Kit, tiny: Path) -> None:
        assert shell(kit, tiny, "trap 'exit 4' TERM; kill -TERM 0; sleep 5").returncode == 4

    def test_two_at_a_time(self, kit: Kit, tiny: Path) -> None:
        first = started(kit, tiny, "echo ready; sleep 2; echo first")
        assert shown(kit, tiny, "echo second") == "second\n"
        assert first.communicate()[0] == "first\n"


class TestTerminal:
    """A terminal of our own, with the runner as its first program."""

    def test_keys_reach_the_command_and_the_terminal_comes_back(self, kit: Kit, tiny: Path) -> None:
        script = "trap 'echo interrupted; exit 5' INT; test -t 0 && echo ready; while :; do sleep 0.1; done"
        output, status = in_terminal(kit, tiny, script, [("ready", b"\x03")])
        assert "interrupted" in output
        assert status == 5

    def test_stop_key_does_not_hang(self, kit: Kit, tiny: Path) -> None:
        output, status = in_terminal(kit, tiny, "echo ready; sleep 1; echo went on", [("ready", b"\x1a")])
        assert "went on" in output
        assert status == 0

    def test_interactive_shell(self, kit: Kit, tiny: Path) -> None:
        output, status = in_terminal(kit, tiny, "exec sh -i", [("# ", b"echo $((6*7))\n"), ("42", b"exit 3\n")])
        assert "42" in output
        assert status == 3


class TestRefusals:
    def test_no_squashfs(self, kit: Kit) -> None:
        finished = kit("run", "--", "true")
        assert finished.returncode == 2
        assert finished.stderr.strip().endswith("dist/cpu/cpu.sqsh: make it first: ./build.py sqsh")

    def test_no_squashfs_in_it(self, kit: Kit, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(bytes(5000))
        finished = kit("run", "--sqsh", tmp_path / "x", "--", "true")
        assert finished.returncode == 2
        assert "is no squashfs" in finished.stderr

    def test_a_pipe_is_refused_and_not_waited_for(self, kit: Kit, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        finished = kit("run", "--sqsh", tmp_path / "pipe", "--", "true")
        assert (finished.returncode, finished.stderr.count("\n")) == (2, 1)
        assert "pipe is no file" in finished.stderr

    def test_broken_squashfs(self, kit: Kit, tiny: Path, tmp_path: Path) -> None:
        (tmp_path / "cut.sqsh").write_bytes(tiny.read_bytes()[:50_000])
        finished = kit("run", "--engine", "own", "--sqsh", tmp_path / "cut.sqsh", "--", "true")
        assert finished.returncode == 1
        assert finished.stderr.startswith("error: the container could not start: mount:")
        assert finished.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("words", "part"),
        [
            (("--env", "1=2"), "sets no variable"),
            (("--network", "some"), "unknown network 'some'"),
            (("--engine", "docker"), "unknown engine 'docker'"),
        ],
    )
    def test_nonsense(self, kit: Kit, tiny: Path, words: tuple[str, str], part: str) -> None:
        finished = kit("run", "--sqsh", tiny, *words, "--", "true")
        assert finished.returncode == 2
        assert part in finished.stderr


class TestWithoutRoot:
    def test_a_user_whom_the_image_does_not_know(self, kit: Kit, tiny: Path) -> None:
        """Mounted, or unpacked where the user cannot open /dev/fuse; tests/slurm has each of the two for certain."""
        with tempfile.TemporaryDirectory() as public:
            shutil.copytree(kit.root / "kit", Path(public, "kit"), ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(tiny, public)
            state = Path(public, "state")
            state.mkdir()
            os.chown(state, 30001, 30001)
            Path(public).chmod(0o755)
            script = "id -u; echo x > /new && cat /new; test -w /tmp; exit 7"
            words = ["/usr/bin/python3", "-B", "-m", "kit.node_run", "--sqsh", f"{public}/{tiny.name}", "--mount"]
            finished = subprocess.run(
                [*words, f"{public}/kit:/k:ro", "--", "sh", "-c", f"touch /k/x; {script}"],
                cwd=public,
                env={"PATH": "/usr/bin:/bin", "KIT_STATE": str(state), "HOME": "/nonexistent"},
                user=30001,
                group=30001,
                extra_groups=[],
                capture_output=True,
                text=True,
            )
            assert (finished.returncode, finished.stdout) == (7, "0\nx\n"), finished.stderr
            assert "Read-only file system" in finished.stderr
            assert list(state.iterdir()) == []


class TestEnroot:
    def test_command_line(self, kit: Kit, tiny: Path, tmp_path: Path, monkeypatch) -> None:
        """enroot itself is not here; what it would be told is."""
        told = tmp_path / "told.json"
        fake = tmp_path / "bin/enroot"
        fake.parent.mkdir()
        fake.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"json.dump([sys.argv[1:], os.environ.get('ENROOT_UNSHARE_NET')], open({str(told)!r}, 'w'))\nsys.exit(6)\n"
        )
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
        options = ("--mount", f"{tmp_path}:/x:ro", "--env", "A=b c", "--network", "none")
        assert kit("run", "--sqsh", tiny, *options, "--", "a", "b c").returncode == 6
        words, network = json.loads(told.read_text())
        mount = f"{tmp_path}:/x:none:x-create=auto,bind,ro"
        assert words == ["start", "--root", "--rw", "--mount", mount, "--env", "A=b c", str(tiny), "a", "b c"]
        assert network == "y"


def started(kit: Kit, squashfs: Path, script: str) -> subprocess.Popen[str]:
    """Running, and past its first line, `ready`."""
    process = kit.start("run", "--engine", "own", "--sqsh", squashfs, "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def in_terminal(kit: Kit, squashfs: Path, script: str, answers: list[tuple[str, bytes]]) -> tuple[str, int]:
    """What the command showed on a terminal where each awaited text is answered with keys, and its exit status."""
    argv = kit.argv("run", "--engine", "own", "--sqsh", squashfs, "--", "sh", "-c", script)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(argv[0], argv, kit.env)
    shown, waiting = "", list(answers)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError:  # the last program with this terminal is gone
            break
        if waiting and waiting[0][0] in shown:
            os.write(terminal, waiting.pop(0)[1])
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return found


def descendants(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [found for child in children for found in (int(child), *descendants(int(child)))]


def gone(processes: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{number}").exists() for number in processes):
            return True
        time.sleep(0.05)
    return False

"""The `sqsh` command: what it says, how it ends, and that nothing is left when it is ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sqsh.convert import Options, convert
from sqsh.errors import BadImage
from sqsh.image import find_image
from sqsh.verify import verify
from tests.sqsh.layers import Item, write_image

pytestmark = pytest.mark.sqsh
REPO = Path(__file__).resolve().parents[2]


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "sqsh", *map(str, words)]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=REPO, capture_output=True, text=True)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layout")
    write_image(root / "oci", [[Item(b"noise%d" % number, os.urandom(5_000_000)) for number in range(30)]], how="tar")
    return root / "oci"


def test_it_says_what_it_made_and_verifies(layout: Path, tmp_path: Path) -> None:
    finished = run(layout, tmp_path / "out", "--no-cache", "--verify", "--json", "--name", "here")
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["digest"].startswith("sha256:")
    assert answer["size"] == (tmp_path / "out").stat().st_size
    assert "all of its 39 entries are as the layers have them" in finished.stderr


@pytest.mark.parametrize(("words", "status"), [([], 0), (["--level", "99"], 2), (["--no-such-option"], 2)])
def test_a_closed_stderr_changes_nothing(layout: Path, tmp_path: Path, words: list[str], status: int) -> None:
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command(layout, tmp_path / "out", "--no-cache", "--verify", *words)]
    finished = subprocess.run(closed, cwd=REPO, stdout=subprocess.PIPE)
    assert (finished.returncode, finished.stdout) == (status, b"")
    assert [path.name for path in tmp_path.iterdir()] == ([] if status else ["out"])


def test_its_wheel_alone_makes_the_same_bytes(layout: Path, tmp_path: Path) -> None:
    """Installed as a user would, with what this machine's pip finds; nothing of the kit is within reach."""
    shutil.copytree(REPO / "sqsh", tmp_path / "source")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    pip: list[str | Path] = [tmp_path / "env/bin/pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, tmp_path / "source"], check=True)
    subprocess.run([*pip, "install", *tmp_path.glob("*.whl")], check=True)
    words: list[str | Path] = [tmp_path / "env/bin/sqsh", layout, tmp_path / "alone", "--no-cache", "--verify"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run(words, check=True, cwd=tmp_path, env=environment)
    convert(str(layout), tmp_path / "here")
    assert (tmp_path / "alone").read_bytes() == (tmp_path / "here").read_bytes()


def test_verify_finds_one_changed_byte(layout: Path, tmp_path: Path) -> None:
    convert(str(layout), tmp_path / "out", Options())
    with (tmp_path / "out").open("r+b") as file:
        file.seek(10_000_000)
        byte = file.read(1)
        file.seek(10_000_000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(BadImage, match=r"/noise[12] differs"):
        verify(find_image(str(layout)), tmp_path / "out", Options())


@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        (["/nowhere/oci"], 2, "no OCI layout at /nowhere/oci"),
        (["LAYOUT", "--level", "99"], 2, "zstd has no level 99"),
        (["LAYOUT", "--block-size", "100K"], 2, "no squashfs has blocks of"),
        (["LAYOUT", "--processors", "-1"], 2, "no number of processors"),
        (["127.0.0.1:9/image:tag"], 1, "cannot reach 127.0.0.1:9"),
    ],
)
def test_errors_are_one_line(layout: Path, tmp_path: Path, words: list[str], status: int, part: str) -> None:
    first, *rest = (str(layout) if word == "LAYOUT" else word for word in words)
    finished = run(first, tmp_path / "out", *rest)
    assert finished.returncode == status
    assert len(finished.stderr.splitlines()) == 1
    assert part in finished.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1])
def test_interrupted(layout: Path, tmp_path: Path, number: signal.Signals, after_s: float) -> None:
    (tmp_path / "out").write_text("earlier")
    process = subprocess.Popen(
        command(layout, tmp_path / "out", "--no-cache"), cwd=REPO, stderr=subprocess.PIPE, text=True
    )
    while len(list(tmp_path.iterdir())) == 1 and process.poll() is None:
        time.sleep(0.001)
    time.sleep(after_s)
    process.send_signal(number)
    errors = process.communicate(timeout=30)[1]
    if (tmp_path / "out").stat().st_size > 10:
        pytest.skip("it was done before")
    assert process.returncode == 1
    assert errors.splitlines() == ["error: interrupted; nothing is half-written"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "earlier"


INTERRUPTED = """
import random, signal, sys
from pathlib import Path
from sqsh.convert import Options, convert
from sqsh.image import find_image
from sqsh.verify import verify

chance = random.Random(1)
def interrupt(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
for _ in range(100):
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.4))
        convert(sys.argv[1], Path(sys.argv[2]), Options(block_size=4096, processors=2))
        verify(find_image(sys.argv[1]), Path(sys.argv[2]), Options(block_size=4096))
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert {path.name for path in Path(sys.argv[2]).parent.iterdir()} <= {"oci", "out"}, "something is left"
"""


def test_interruptions_at_any_moment_neither_hang_nor_leave_anything(tmp_path: Path) -> None:
    items = [Item(b"%d" % number, os.urandom(5000)) for number in range(1500)]
    write_image(tmp_path / "oci", [items], how="tar")
    words: list[str | Path] = [sys.executable, "-c", INTERRUPTED, tmp_path / "oci", tmp_path / "out"]
    subprocess.run(words, cwd=REPO, check=True, timeout=120)


def test_what_a_killed_conversion_left_goes_with_the_next(layout: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(command(layout, tmp_path / "out", "--no-cache"), cwd=REPO, stderr=subprocess.DEVNULL)
    while not list(tmp_path.iterdir()):
        time.sleep(0.001)
    process.kill()
    process.wait()
    if (tmp_path / "out").exists():
        pytest.skip("it was done before")
    assert len(list(tmp_path.iterdir())) == 1
    assert run(layout, tmp_path / "out", "--no-cache").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_disk_full(layout: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(tmp_path)], check=True)
    try:
        finished = run(layout, tmp_path / "out", "--no-cache")
        assert finished.returncode == 1
        assert "no space left on device for" in finished.stderr
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)

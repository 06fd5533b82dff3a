"""What a person and a CI log see of a step."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

from kit import steps
from kit.layout import REPO
from kit.steps import complete_step, say, seconds_text, size_text

pytestmark = pytest.mark.unit


def test_plain_lines_nest_and_carry_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with complete_step("outer"), complete_step("inner") as step:
        step.note("42 MB")
        say("by the way")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["… outer", "  … inner", "    by the way"]
    assert lines[3].startswith("  ✓ inner  (0.")
    assert lines[3].endswith(" s, 42 MB)")
    assert "\x1b" not in "".join(lines)


def test_a_failed_step_says_so_and_lets_the_error_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), complete_step("thing"):
        raise ValueError("no")
    assert capsys.readouterr().err.splitlines()[-1].startswith("✗ thing")


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_quiet", True)
    with complete_step("thing"):
        say("words")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (3_836_414_377, "3.84 GB"),
        (999_600, "1 MB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


def test_seconds() -> None:
    assert [seconds_text(value) for value in (0.04, 59.94, 61, 3600)] == [
        "0.0 s",
        "59.9 s",
        "1 min 01 s",
        "60 min 00 s",
    ]


@pytest.mark.parametrize("color", [True, False])
def test_on_a_terminal_the_last_line_names_the_open_steps(color: bool) -> None:
    program = """
import time
from kit.steps import complete_step
with complete_step("outer"), complete_step("inner"):
    time.sleep(0.3)
"""
    hidden = ("CI", "NO_COLOR", "TERM")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | {"TERM": "xterm"}
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPO, stderr=slave, env=env if color else {**env, "NO_COLOR": "1"}
    ) as process:
        os.close(slave)
        seen = b""
        with suppress(OSError):  # the terminal's other end is closed
            while part := os.read(master, 65536):
                seen += part
        os.close(master)
    assert process.returncode == 0
    text = seen.decode()
    assert "outer › inner" in text
    assert text.rstrip().splitlines()[-1].split("(")[0].endswith("outer  ")
    assert ("\x1b[32m" in text) == color

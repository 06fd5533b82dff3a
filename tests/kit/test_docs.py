"""What the documentation says can be typed exists, each `--help` has an example, and each cause has a line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import build
from tests.kit.conftest import REPO

pytestmark = pytest.mark.unit
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
CLI = (REPO / "functional/suite/cli.py").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))


def commands(text: str) -> list[str]:
    """Lines of indented and fenced blocks, and code in the text."""
    blocks = re.findall(r"^(?: {4}|\t)(\S.*)$", text, re.MULTILINE)
    fenced = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return blocks + fenced + re.findall(r"`([^`\n]+)`", text)


def options_of(command: Any) -> set[str]:
    return {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}


def functional_options(name: str) -> set[str] | None:
    """Options of a command of the image, from its source, since its packages are not here."""
    function = re.escape(name.replace("-", "_"))
    quoted = rf'@app\.command\((?:"{re.escape(name)}")?\)\ndef {function}(?:_command)?\((.*?)\n\) ->'
    match = re.search(quoted, CLI, re.DOTALL) or re.search(rf"\ndef {function}\((.*?)\) -> None", CLI, re.DOTALL)
    if match is None:
        return None
    plain = {f"--{word.replace('_', '-')}" for word in re.findall(r"(\w+): Annotated", match[1])}
    return plain | set(re.findall(r'"(--[a-z-]+)"', match[1])) | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists_with_its_options(page: Path) -> None:
    host: dict[str, Any] = typer.main.get_command(build.app).commands  # type: ignore[attr-defined]
    for line in commands(page.read_text()):
        for match in re.finditer(r"\./build\.py(?: --quiet)? ([a-z]+)([^;|&`]*)", line):
            name, rest = match[1], match[2].split(" -- ")[0]
            assert name in host, line
            assert set(re.findall(r"(?<!\S)(--[a-z-]+)", rest)) <= options_of(host[name]) | {"--help"}, line
        for match in re.finditer(r"^functional ([a-z-]+)([^;|&`]*)", line):
            known = functional_options(match[1])
            assert known is not None, line
            assert set(re.findall(r"(?<!\S)(--[a-z-]+)", match[2])) <= known, line
        for match in re.finditer(r"^make ([a-z -]+)", line):
            assert set(match[1].split()) <= TARGETS, line


def test_every_help_has_an_example() -> None:
    for name in typer.main.get_command(build.app).commands:  # type: ignore[attr-defined]
        shown = CliRunner().invoke(build.app, [name, "--help"])
        assert shown.exit_code == 0
        assert re.search(rf"Examples?: .*{name}|Examples?:.*(\n.*)*{name}", shown.stdout), name
    bodies = re.findall(r'@app\.command\([^)]*\)\ndef (\w+)\(.*?"""(.*?)"""', CLI, re.DOTALL)
    assert len(bodies) >= 10
    assert [name for name, text in bodies if "Example: " not in text] == []


def test_every_cause_of_the_doctor_has_a_line() -> None:
    folder = REPO / "functional/suite/doctor"
    causes, examine = (folder / "causes.py").read_text(), (folder / "examine.py").read_text()
    named = set(re.findall(r'_cause\(\s*"([a-z-]+)"', causes))
    named |= set(re.findall(r'Result\.(?:PROBLEM|RECOVERED),\s*"([a-z-]+)"', examine))
    named |= set(re.findall(r'": \("([a-z-]+)", "', examine))
    assert len(named) > 35
    assert named - set(re.findall(r"`([a-z-]+)`", (REPO / "docs/errors.md").read_text())) == set()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str) -> None:
    script = subprocess.run(
        [sys.executable, REPO / "build.py", "completion", shell], capture_output=True, text=True, timeout=60
    )
    assert script.returncode == 0
    assert "_BUILD_PY_COMPLETE=complete_" in script.stdout
    if shell == "bash":
        typed = f"{script.stdout}\nCOMP_WORDS=(x verify --j) COMP_CWORD=2\n_buildpy_completion {REPO}/build.py\n"
        done = subprocess.run(
            ["bash", "-c", f'{typed}echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "--json\n", done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text()):
        link = next(word for word in target if word)
        if not link.startswith(("http:", "https:")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"

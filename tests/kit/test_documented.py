"""Every command of the documentation is run: here, by another test, by a part of CI, or by hand where that is told."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.command_fates import FATES, IN_IMAGE, NAMED, NO_COMMANDS, ByHand, Here, Parts, Run
from tests.kit.conftest import REPO, Kit
from tests.kit.documented import PAGES, commands_in_blocks, commands_in_text
from tests.kit.tiny_image import Entry, folder

HERE = {text: fate for text, fate in FATES.items() if isinstance(fate, Here)}
RUNS = {text: fate for text, fate in FATES.items() if isinstance(fate, Run)}
BY_HAND = {text: fate for text, fate in FATES.items() if isinstance(fate, ByHand)}
RUNS |= {text: fate.nearest for text, fate in BY_HAND.items() if fate.nearest is not None}
PARTS = [text for text, fate in FATES.items() if isinstance(fate, Parts)]


@pytest.mark.unit
def test_each_has_a_fate_and_no_fate_is_of_a_command_that_is_gone() -> None:
    blocks = [line for page in PAGES for line in commands_in_blocks(page)]
    assert len(blocks) > 40
    odd = [line for line in blocks if not line.is_command and not line.text.startswith(NO_COMMANDS)]
    assert odd == [], "a program that tests/kit/documented.py does not know"
    told = (REPO / IN_IMAGE).read_text()
    for line in blocks:
        for said in line.said:
            assert said.startswith(NO_COMMANDS) or said in told, f"{line.page}: is «{said}» a command, or an output?"
    found = {line.text for line in blocks if line.is_command}.union(*map(commands_in_text, PAGES))
    assert found - FATES.keys() - NAMED == set(), "give it a fate in tests/kit/command_fates.py"
    assert (FATES.keys() | NAMED) - found == set(), "no page has it any more"


@pytest.mark.unit
@pytest.mark.parametrize("command", RUNS)
def test_what_runs_it_is_there_and_does(command: str) -> None:
    run = RUNS[command]
    held = strings_of(REPO / run.file, run.name)
    for text in run.as_text or (command,):
        assert any(text in one for one in held), f"{run.file} {run.name} does not hold «{text}»"


def strings_of(path: Path, name: str) -> list[str]:
    """The text of a function, with the constants of its file that it uses; of the whole file without a name. Strings of
    Python in pieces come as one."""
    text = path.read_text()
    if not name:
        return [text]
    if path.suffix == ".sh":
        body = re.search(rf"^{name}\(\) \{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
        assert body is not None, f"{path} has no {name}"
        return [body[1]]
    tree = ast.parse(text)
    (function,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    used = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and {ast.unparse(one) for one in node.targets} & names
    ]
    nodes = [child for node in (function, *used) for child in ast.walk(node)]
    pieces = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    return [*pieces, *(ast.get_source_segment(text, node) or "" for node in (function, *used))]


@pytest.mark.unit
@pytest.mark.parametrize("command", BY_HAND)
def test_a_page_says_what_came_of_it_by_hand(command: str) -> None:
    fate = BY_HAND[command]
    text = " ".join((REPO / fate.page).read_text().split())
    assert fate.as_text in text, f"{fate.page} does not say «{fate.as_text}»"


@pytest.mark.unit
@pytest.mark.parametrize("command", PARTS)
def test_its_parts_are_run_by_themselves(command: str) -> None:
    target, *settings = command.removeprefix("make ").split()
    (recipe,) = re.findall(rf"^{target}:\n\t@ci/test\.sh (.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    parts = settings[0].removeprefix("PARTS=").split() if recipe == "$(PARTS)" else recipe.split()
    for part in parts:
        assert strings_of(REPO / "ci/test.sh", part)


@pytest.fixture
def clone(tmp_path: Path) -> Kit:
    """A copy of the kit with all that these commands name: a release, another's image, an environment, `sqsh`."""
    kit = Kit(tmp_path / "clone")
    for name in ("kit", "sqsh", "ci", "lockfiles"):
        shutil.copytree(
            REPO / name, kit.root / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        )
    for name in ("build.py", "Makefile"):
        shutil.copy(REPO / name, kit.root)
    inputs = {"base": "1" * 64}
    build = f'{{"inputs": {{"base": "{inputs["base"]}"}}}}'.encode()
    kit.release("cpu", [[folder("opt/release"), Entry("opt/release/build.json", build)]], None, inputs)
    for place in ("../other/dist/cpu/oci", "path/to/oci-layout"):
        shutil.copytree(kit.root / "dist/cpu/oci", kit.root / place)
    program(kit.root / ".venv/bin/python", f'KIT_NO_VENV=1 exec {sys.executable} "$@"')
    (kit.root / ".venv/.installed").touch()
    program(tmp_path / "bin/sqsh", f'exec {sys.executable} -m sqsh "$@"')
    return kit


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("command", HERE)
def test_it_runs_as_it_stands(clone: Kit, command: str) -> None:
    fate = HERE[command]
    environment = {name: value for name, value in clone.env.items() if name not in ("KIT_NO_VENV", "IMAGE")}
    environment["PATH"] = f"{clone.root.parent / 'bin'}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=clone.root, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in fate.statuses, done.stdout + done.stderr
    assert fate.says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.image
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a squashfs needs root")
@pytest.mark.skipif(not (REPO / "dist/cpu/cpu.sqsh").exists(), reason="no squashfs here: make image sqsh")
def test_a_command_in_the_squashfs() -> None:
    command = "./build.py run -- python -c 'import torch'"
    done = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

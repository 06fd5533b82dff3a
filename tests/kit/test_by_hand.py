"""What the documentation has people type for a build by hand, a trainer image and new locks: minutes each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kit.layout import REPO, inputs_dir, state_dir

pytestmark = [
    pytest.mark.image,
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="the kit's own engine needs root"),
    pytest.mark.skipif(not (inputs_dir("cpu") / "inputs.json").exists(), reason="needs ./build.py fetch"),
]


def typed(script: str, cwd: Path = REPO, **settings: str) -> str:
    """Answers what it prints; it must end well."""
    environment = {**os.environ, **settings}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def registry() -> str:
    """The kit's own, on loopback, started."""
    typed("./build.py services start")
    return str(json.loads(typed("./build.py services status --json"))["registry"]["address"])


def test_the_image_by_hand() -> None:
    """Its bytes are in the registry afterwards, and a command in it answers."""
    image = f"{registry()}/by-hand:test"
    typed(
        'eval "$(./build.py services env)"\n'
        "docker buildx build --build-context nemo-rl=. --build-arg BUILD_DYNAMO=1 --target release"
        ' --file docker/Dockerfile --tag "$IMAGE" --push .',
        IMAGE=image,
    )
    inspected = json.loads(typed(f"skopeo inspect --tls-verify=false docker://{image}"))
    assert len(inspected["Layers"]) >= 4


def test_the_trainer_image() -> None:
    made = REPO / "dist/trainer"
    assert not made.exists(), "somebody's release"
    try:
        typed("./build.py image --no-dynamo --name trainer")
        record = json.loads((made / "record.json").read_text())
        assert "dynamo-cpu" not in record["image"]["inputs"]
    finally:
        shutil.rmtree(made, ignore_errors=True)


def test_the_locks_are_what_their_sources_give(tmp_path: Path) -> None:
    """In a clone. Asks the package index."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(REPO), str(clone)], check=True)
    (clone / ".venv").symlink_to(REPO / ".venv")
    typed("./build.py lock", clone, KIT_STATE=str(state_dir()))
    changed = subprocess.run(["git", "status", "--porcelain", "lockfiles"], cwd=clone, capture_output=True, text=True)
    assert changed.stdout == ""

"""`./build.py submit` of an ordinary user: what it finds before, and the suite's report in the release's record."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.slurm.conftest import REPO, SHARED, local

pytestmark = [pytest.mark.slurm, pytest.mark.image, pytest.mark.usefixtures("nothing_left")]

ALICE = 30001


@pytest.fixture
def release(site: None) -> Path:
    """A copy of the kit in a folder of hers, with the release's squashfs and record."""
    root = SHARED / "alice/kit"
    shutil.rmtree(root, ignore_errors=True)
    for package in ("kit", "sqsh", "ci"):
        shutil.copytree(REPO / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "build.py", root)
    (root / "ray.sub").symlink_to("ci/slurm/ray.sub")
    made, name = root / "dist/cpu", os.environ.get("NAME") or "cpu"
    made.mkdir(parents=True)
    shutil.copy(REPO / "dist" / name / "record.json", made)
    for path in (root, root / "dist", made, made / "record.json"):
        os.chown(path, ALICE, ALICE)
    # Its own file keeps its owner: the image's is the release's, and she may only read it.
    os.link(SHARED / "images/cpu.sqsh", made / "cpu.sqsh")
    return made


def submit(*words: str, backend: str = "runner") -> subprocess.CompletedProcess[str]:
    packages = Path("/srv/kit/.venv") / Path(sysconfig.get_path("purelib")).relative_to(sysconfig.get_path("data"))
    settings = ("KIT_NO_VENV=1", f"PYTHONPATH={packages}", "PYTHONDONTWRITEBYTECODE=1", "OBJECT_STORE_BYTES=100000000")
    python = ("env", "--chdir=/srv/alice/kit", *settings, "python3", "build.py", "submit", "--backend", backend)
    return local("run", "-u", "alice", *python, *words, check=False, seconds=900)


def test_what_would_fail_later_is_named_before(release: Path) -> None:
    options = ("--partition", "none", "--gpus", "9", "--nodes", "1", "grpo.max_num_steps=0")
    finished = submit("--dry-run", *options)
    assert finished.returncode == 1
    assert "there is no partition 'none': choose of local" in finished.stderr
    assert "✗ 1 node(s) with 9 GPU(s)" in finished.stderr
    assert "✗ recipe: " in finished.stderr
    assert "nothing was submitted" in finished.stderr.splitlines()[-1]


def test_dry_run_prints_the_job(release: Path) -> None:
    finished = submit("--dry-run", "--json", "--gpus", "2", "grpo.seed=7")
    assert finished.returncode == 0, finished.stderr
    assert "✗" not in finished.stderr
    assert "seen on 1" in finished.stderr
    job = json.loads(finished.stdout)
    assert job["environment"]["COMMAND"].endswith("tests/functional/grpo_dynamo.sh grpo.seed=7")
    assert "--gres=gpu:2" in job["sbatch"]


def test_options_of_the_suite_are_given_after_two_dashes(release: Path) -> None:
    words = ("--driver=nemo-rl", "--share-gpu", "examples/recipe.yaml", "+data.train.data_path=/srv/x")
    finished = submit("--dry-run", "--json", "--gpus", "2", "--", *words)
    assert finished.returncode == 0, finished.stderr
    assert "? recipe: examples/recipe.yaml is read by the driver, when the run begins" in finished.stderr
    command = json.loads(finished.stdout)["environment"]["COMMAND"]
    assert command.startswith("env RECIPE=examples/recipe.yaml ")
    assert command.endswith("grpo_dynamo.sh --driver=nemo-rl --share-gpu +data.train.data_path=/srv/x")


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "backend"), [(1, "runner"), (2, "runner"), (1, "oci")])
def test_the_suite_ends_in_the_record(release: Path, nodes: int, backend: str) -> None:
    """On two nodes the trainer is on one of them, and an engine on each."""
    recipe = () if nodes == 1 else ("cluster.num_nodes=2",)
    finished = submit("--gpus", "2", "--nodes", str(nodes), "--no-check", *recipe, backend=backend)
    assert finished.returncode == 0, finished.stderr
    assert "] step 1: " in finished.stderr, "the suite's progress"
    record = json.loads((release / "record.json").read_text())
    assert record["functional"]["status"] == "passed"
    report = json.loads((release / "functional/report.json").read_text())
    assert len(report["topology"]["nodes"]) == nodes

    facts = json.loads((release / "functional/release.json").read_text())
    assert facts["sqsh_sha256"] == record["sqsh"]["sha256"]
    assert facts["inputs"] == record["image"]["inputs"]
    page = (release / "functional/report.md").read_text()
    assert "hashed before the job was submitted" in page
    assert "hash not told" not in page
    job = record["functional"]["job"]
    assert (job["nodes"], job["backend"]) == ("node1" if nodes == 1 else "node[1-2]", backend)
    assert 0 < job["seconds"]["containers"] <= job["seconds"]["command"] < job["seconds"]["ended"]


@pytest.mark.full
def test_make_submit(release: Path) -> None:
    """As it stands in the README; what it names comes from the environment. A run of one step, as a job."""
    root = release.parents[1]
    shutil.copy(REPO / "Makefile", root)
    for name in ("lockfiles", "tests/functional"):
        shutil.copytree(REPO / name, root / name)
    packages = Path("/srv/kit/.venv") / Path(sysconfig.get_path("purelib")).relative_to(sysconfig.get_path("data"))
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nKIT_NO_VENV=1 PYTHONPATH={packages} PYTHONDONTWRITEBYTECODE=1 exec python3 "$@"\n')
    python.chmod(0o755)
    (root / ".venv/.installed").touch()
    settings = ("GPUS_PER_NODE=2", "SLURM_PARTITION=local", "OBJECT_STORE_BYTES=100000000", "CONTAINER_BACKEND=runner")
    words = ("env", "--chdir=/srv/alice/kit", *settings, "make submit")
    finished = local("run", "-u", "alice", *words[:-1], *words[-1].split(), check=False, seconds=900)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((release / "record.json").read_text())["functional"]["status"] == "passed"

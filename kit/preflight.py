"""What would make a Slurm job fail later, found before it is submitted."""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kit import slurm
from kit.command import run
from kit.errors import KitError
from kit.state import REPO
from kit.steps import say

NODE_SCRIPT = REPO / "ci/slurm/node.sh"
SHARED_DEADLINE_S = "15"
NO_NODE_FREE = re.compile(r"immediate|temporarily unavailable|nodes are busy", re.IGNORECASE)


@dataclass(frozen=True)
class Asked:
    """What the job is to be."""

    nodes: int
    gpus: int
    partition: str
    account: str
    sbatch: Sequence[str]
    environment: Mapping[str, str]
    squashfs: Path
    mounts: Sequence[str]
    logs: Path
    recipe: str  # in the image
    others: Sequence[str]  # settings, and options of the suite


@dataclass(frozen=True)
class Found:
    what: str
    result: Literal["ok", "failed", "unknown"]
    detail: str = ""


def check_before(asked: Asked) -> list[Found]:
    """One finding a check, each said as it comes."""
    findings = []
    for check in (_partition, _account, _gpus, _logs, _recipe, _controller, _nodes):
        for found in check(asked):
            mark = {"ok": "✓", "failed": "✗", "unknown": "?"}[found.result]
            say(f"{mark} {found.what}{f': {found.detail}' if found.detail else ''}")
            findings.append(found)
        if check is _controller and any(found.result == "failed" for found in findings):
            break  # a job that would be refused need not ask the nodes
    return findings


def _partition(asked: Asked) -> Iterator[Found]:
    name = asked.partition or "the default partition"
    if not asked.partition:
        return
    facts = slurm.show("partition", asked.partition)
    if facts is None:
        known = slurm.ask("sinfo", "--noheader", "--format=%R").stdout.split()
        yield Found("partition", "failed", f"there is no partition '{name}': choose of {' '.join(known)}")
    elif facts.get("State") != "UP":
        yield Found("partition", "failed", f"{name} is {facts.get('State')}: it starts no jobs")
    else:
        yield Found("partition", "ok", name)


def _account(asked: Asked) -> Iterator[Found]:
    if not asked.account:
        return
    if slurm.configuration("AccountingStorageType") in ("", "(null)", "accounting_storage/none"):
        yield Found("account", "unknown", "this site keeps no accounts: any name is accepted")
        return
    words = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}", "format=account"]
    known = slurm.ask(*words).stdout.split()
    if asked.account in known:
        yield Found("account", "ok", asked.account)
    else:
        yield Found("account", "failed", f"'{asked.account}' is none of yours: {' '.join(known) or 'you have none'}")


def _gpus(asked: Asked) -> Iterator[Found]:
    words = ["sinfo", "--noheader", "--Node", "--format=%N|%G|%T"]
    if asked.partition:
        words.append(f"--partition={asked.partition}")
    enough, most = set(), 0
    for line in slurm.ask(*words).stdout.splitlines():
        node, gres, state = line.split("|")
        count = sum(int(number) for number in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", gres))
        most = max(most, count)
        if count >= asked.gpus and not re.match(r"down|drain|fail|maint|unknown", state):
            enough.add(node)
    what = f"{asked.nodes} node(s) with {asked.gpus} GPU(s)"
    if len(enough) >= asked.nodes:
        yield Found(what, "ok", f"{len(enough)} of them")
    else:
        yield Found(what, "failed", f"{len(enough)} that are up have them; the most GPUs of a node: {most}")


def _logs(asked: Asked) -> Iterator[Found]:
    try:
        asked.logs.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=asked.logs):
            pass
    except OSError as error:
        yield Found("log folder", "failed", f"{asked.logs}: {error.strerror}: name another with --logs")
    else:
        yield Found("log folder", "ok", str(asked.logs))


def _recipe(asked: Asked) -> Iterator[Found]:
    """As the image itself sees it: keys, model, data; and the devices it takes."""
    if any(word.startswith("--driver=") for word in asked.others):
        yield Found("recipe", "unknown", f"{asked.recipe} is read by the driver, when the run begins")
        return
    words = [sys.executable, "-m", "kit.node_run", "--sqsh", str(asked.squashfs)]
    for mount in asked.mounts:
        words += ["--mount", mount]
    settings = [word for word in asked.others if not word.startswith("-")]
    words += ["--env", "RAY_ADDRESS=slurm", "--", "functional", "config", asked.recipe, *settings, "--json"]
    try:
        finished = run(words, cwd=REPO, check=False, timeout_s=300)
        shown = json.loads(finished.stdout)
    except (KitError, ValueError):
        yield Found("recipe", "unknown", f"the image did not say: {finished.stderr.strip().splitlines()[-1:]}")
        return
    if not shown["valid"]:
        yield Found("recipe", "failed", shown["error"])
        return
    yield Found("recipe", "ok", f"{asked.recipe}, as the image reads it")
    cluster = shown["recipe"]["cluster"]
    wanted = f"{cluster['num_nodes']} node(s) with {cluster['gpus_per_node']} GPU(s)"
    if cluster["num_nodes"] > asked.nodes or cluster["gpus_per_node"] > asked.gpus:
        yield Found(
            "devices", "failed", f"the recipe takes {wanted}: --nodes {asked.nodes} --gpus {asked.gpus} give less"
        )
    else:
        yield Found("devices", "ok", f"the recipe takes {wanted}")


def _controller(asked: Asked) -> Iterator[Found]:
    program, *options = asked.sbatch
    finished = run([program, "--test-only", *options], env=asked.environment, check=False, timeout_s=slurm.TIMEOUT_S)
    said = finished.stderr.strip().splitlines()[-1:] or ["accepted"]
    text = re.sub(r"^(sbatch: |allocation failure: |error: )+", "", said[0])
    yield Found("Slurm's own test", "ok" if finished.returncode == 0 else "failed", text)


def _nodes(asked: Asked) -> Iterator[Found]:
    """On nodes, if as many are free at once: what the job checks again on its own."""
    with tempfile.TemporaryDirectory(dir=asked.logs, prefix=".preflight-") as folder:
        canary = secrets.token_hex(16)
        Path(folder, "canary").write_text(canary)
        Path(folder).chmod(0o700)
        words = [
            "srun", "--immediate=15", "--time=2", "--job-name=preflight",
            f"--nodes={asked.nodes}", "--ntasks-per-node=1",
            *([f"--partition={asked.partition}"] if asked.partition else []),
            *([f"--account={asked.account}"] if asked.account else []),
            "bash", "-c", NODE_SCRIPT.read_text(), "node.sh", "check",
        ]  # fmt: skip
        environment = {
            **asked.environment,
            "JOB_FOLDER": folder,
            "JOB_CANARY": canary,
            "JOB_SCRATCH": "/tmp/none",
            "SHARED_DEADLINE_S": SHARED_DEADLINE_S,
        }
        finished = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=180)
    errors = [line.removeprefix("error: ") for line in finished.stderr.splitlines() if line.startswith("error: ")]
    if finished.returncode == 0:
        yield Found("squashfs, mounts and log folder on the nodes", "ok", f"seen on {asked.nodes}")
    elif errors:
        for error in sorted(set(errors)):
            yield Found("on the nodes", "failed", error)
    else:
        said = " ".join(finished.stderr.split())[-200:]
        if NO_NODE_FREE.search(said):
            said = f"not so many nodes are free now, and the job itself checks it first ({said})"
        yield Found("squashfs, mounts and log folder on the nodes", "unknown", said)

"""Run the suite as a Slurm job: check, submit, follow, and bring the report into the release's record."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import slurm
from kit.command import run
from kit.errors import KitError, UsageError
from kit.functional import COMMAND, WORK_PREFIX, checked_release, data_mounts, find_recipe, record_results
from kit.layout import Release, only_run, release
from kit.preflight import Asked, check_before
from kit.record import JobFacts, Record, read_record
from kit.release_facts import write_facts
from kit.run import Ended
from kit.state import REPO
from kit.steps import say, seconds_text

SCRIPT = REPO / "ray.sub"
BACKENDS = ("", "pyxis", "enroot", "oci", "runner")
LOOK_S = 2.0  # between two looks at a job; each asks Slurm's controller
PROGRESS = re.compile(r"\[ *\d+\.\d s\] ")  # how each line of the suite's own progress begins


@dataclass(frozen=True)
class Wanted:
    """What the command line says."""

    name: str
    words: Sequence[str]
    nodes: int
    gpus: int
    partition: str
    account: str
    time: str
    mounts: Sequence[str]
    logs: Path | None
    backend: str
    options: Sequence[str]


def submit_suite(wanted: Wanted, *, check: bool, dry_run: bool, as_json: bool) -> int:
    """The job's exit status. Raises KitError for what would make the job fail, before it is submitted."""
    asked = _asked(wanted)
    if check and (failed := [found for found in check_before(asked) if found.result == "failed"]):
        raise KitError(f"{failed[0].what}: {failed[0].detail}", f"nothing was submitted; {len(failed)} check(s) failed")
    if dry_run:
        print(json.dumps(_as_plain(asked), indent=2) if as_json else _as_text(asked))
        return 0
    made = release(wanted.name)
    with only_run(f"submit-{wanted.name}"):
        record = checked_release(made)
        asked.logs.mkdir(parents=True, exist_ok=True)  # without it the job would end before its first line
        environment = {**asked.environment, "RELEASE_FACTS": str(_facts(record, asked.logs))}
        number = run(list(asked.sbatch), env=environment, timeout_s=slurm.TIMEOUT_S).stdout.split(";")[0].strip()
        logs = asked.logs / f"{number}-logs"
        say(f"job {number}: logs in {logs}; it goes on if this command ends; scancel {number} ends it")
        ended = _followed(number, logs)
        if as_json:
            print(json.dumps({**vars(ended), "logs": str(logs), "phases": list(_phases(logs))}, indent=2))
        results = _copied(made, logs / "results")
        try:
            _see_unchanged(made, record)
            facts = _job_facts(ended, logs, asked.environment["CONTAINER_BACKEND"])
            record_results(made, record, results, Ended(ended.status, interrupted=ended.signal > 0), facts)
        except KitError as error:
            if ended.status == 0:
                raise
            say(f"error: job {number} ended with status {ended.status}, {ended.state.lower()}: {error}")
        finally:
            shutil.rmtree(results, ignore_errors=True)
    return ended.status


def _facts(record: Record, logs: Path) -> Path:
    """Where the job finds what the host knows of the release. It may start after this command has ended, so the file
    stays; one a squashfs."""
    assert record.sqsh is not None
    path = logs / f"release-{record.sqsh.sha256[:12]}.json"
    write_facts(record, path, "before the job was submitted")
    return path


def _see_unchanged(made: Release, record: Record) -> None:
    """Raises KitError where another squashfs lies there now: nobody knows which of the two the job ran in."""
    now = checked_release(made).sqsh
    if now is None or record.sqsh is None or now.sha256 != record.sqsh.sha256:
        raise KitError(f"{made.sqsh} was made anew while the job ran", "submit it again")


def _job_facts(job: slurm.Job, logs: Path, backend: str) -> JobFacts:
    """With the seconds from submission to each phase, where it came first."""
    phases = list(_phases(logs))
    began = phases[0]["at"] if phases else 0.0
    seconds = {phase["phase"]: round(max(phase["at"] - began, 0.0), 2) for phase in reversed(phases)}
    return JobFacts(id=job.id, nodes=job.nodes, backend=backend, seconds=dict(reversed(seconds.items())))


def _asked(wanted: Wanted) -> Asked:
    recipe, others = find_recipe(wanted.words)
    if wanted.backend not in BACKENDS:
        raise UsageError(f"unknown back end '{wanted.backend}'", f"choose {', '.join(BACKENDS[1:])}")
    data_mounts(wanted.mounts)
    made = release(wanted.name)
    logs = (wanted.logs or made.folder / "slurm").absolute()
    command = [
        *([f"RECIPE={recipe}"] if recipe else []),
        *COMMAND,
        *others,
    ]
    environment = {
        "CONTAINER": str(made.sqsh),
        "MOUNTS": ",".join(wanted.mounts),
        "COMMAND": shlex.join(["env", *command]),
        "GPUS_PER_NODE": str(wanted.gpus),
        "BASE_LOG_DIR": str(logs),
        "CONTAINER_BACKEND": wanted.backend or _backend(),
    }
    sbatch = ["sbatch", "--parsable", f"--nodes={wanted.nodes}", "--exclusive", f"--output={logs}/%j.out"]
    sbatch += [f"--gres=gpu:{wanted.gpus}"] if wanted.gpus else []
    sbatch += [f"--account={wanted.account}"] if wanted.account else []
    sbatch += [f"--partition={wanted.partition}"] if wanted.partition else []
    sbatch += [f"--time={wanted.time}"] if wanted.time else []
    return Asked(
        nodes=wanted.nodes,
        gpus=wanted.gpus,
        partition=wanted.partition,
        account=wanted.account,
        sbatch=[*sbatch, *wanted.options, str(SCRIPT)],
        environment=environment,
        squashfs=made.sqsh,
        mounts=wanted.mounts,
        logs=logs,
        recipe=recipe or _own_recipe(made),
        others=others,
    )


def _own_recipe(made: Release) -> str:
    """The one that tests/functional/grpo_dynamo.sh takes in this image."""
    is_cuda = read_record(made.record).image.profile.startswith("cuda")
    return "recipes/grpo_gpu.yaml" if is_cuda else "recipes/grpo_cpu.yaml"


def _backend() -> str:
    if slurm.knows_pyxis():
        return "pyxis"
    return "enroot" if shutil.which("enroot") else "runner"


def _as_plain(asked: Asked) -> dict[str, Any]:
    return {"environment": dict(asked.environment), "sbatch": list(asked.sbatch), "script": str(SCRIPT)}


def _as_text(asked: Asked) -> str:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in asked.environment.items()]
    return "\n".join([*exports, shlex.join(asked.sbatch)])


def _followed(number: str, logs: Path) -> slurm.Job:
    """Until the job has ended; each state, each phase and each line of the suite's progress is said as it comes."""
    said, read, state = 0, 0, ""
    while True:
        job = slurm.job(number)
        phases = list(_phases(logs))
        if job.state != state:
            state = job.state
            say(f"job {number}: {state.lower()}{_where(job)}")
        for phase in phases[said:]:
            say(_as_line(phase, phases[0]["at"]))
        said = len(phases)
        progress, read = _progress(logs / "driver.log", read)
        for line in progress:
            say(f"{'':>12}  {line}")
        if job.ended:
            return job
        time.sleep(LOOK_S)


def _where(job: slurm.Job) -> str:
    if job.state == "PENDING":
        return f" ({job.reason})" if job.reason not in ("", "None") else ""
    return f" on {job.nodes}" if job.nodes not in ("", "(null)") else ""


def _as_line(phase: Mapping[str, Any], began: float) -> str:
    reason = f": {phase['reason']}" if "reason" in phase else ""
    return f"{seconds_text(phase['at'] - began):>12}  {phase['phase']} ({phase['node']}){reason}"


def _phases(logs: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: the last may be half written."""
    try:
        text = (logs / "phases.jsonl").read_text()
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _progress(log: Path, start: int) -> tuple[list[str], int]:
    """The suite's lines of progress among the whole lines from byte `start`, and where the next line begins."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text, end, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return [], start
    lines = text.decode(errors="replace").splitlines()
    return [line for line in lines if PROGRESS.match(line)], start + len(text) + len(end)


def _copied(made: Release, results: Path) -> Path:
    copy = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=made.folder))
    if results.is_dir():
        shutil.copytree(results, copy, dirs_exist_ok=True)
    return copy

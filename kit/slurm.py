"""What Slurm says of partitions, accounts and jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kit.command import Finished, run
from kit.errors import KitError

TIMEOUT_S = 60.0  # a busy controller answers late
HINT = "this must run where jobs are submitted from"
ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    )
)


@dataclass(frozen=True)
class Job:
    id: str
    state: str
    exit_code: int
    signal: int
    reason: str
    nodes: str
    submitted: str

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def status(self) -> int:
        """As a shell would give it; not 0 unless the job completed."""
        status = self.exit_code or (128 + self.signal if self.signal else 0)
        return status or int(self.state != "COMPLETED")


def ask(*words: str, check: bool = True) -> Finished:
    return run(words, check=check, timeout_s=TIMEOUT_S, hint=HINT)


def show(kind: str, name: str) -> dict[str, str] | None:
    """What `scontrol show` says of one thing; None where there is none of that name."""
    finished = ask("scontrol", "show", kind, name, "--oneliner", check=False)
    if finished.returncode != 0:
        said = f"{finished.stdout} {finished.stderr}".strip()
        if "not found" in said or "Invalid" in said:
            return None
        raise KitError(f"scontrol failed: {said}", "is Slurm's controller up?")
    return dict(re.findall(r"(\S+?)=(\S*)", finished.stdout))


def job(number: str) -> Job:
    """Raises KitError for a job that Slurm has forgotten (MinJobAge)."""
    facts = show("job", number)
    if facts is None:
        raise KitError(f"Slurm has forgotten job {number}", "its logs are still there")
    code, _, number_of_signal = facts["ExitCode"].partition(":")
    return Job(
        id=number,
        state=facts["JobState"],
        exit_code=int(code),
        signal=int(number_of_signal or 0),
        reason=facts.get("Reason", ""),
        nodes=facts.get("NodeList", ""),
        submitted=facts.get("SubmitTime", ""),
    )


def configuration(key: str) -> str:
    found = re.search(rf"^{key}\s*= (.*)$", ask("scontrol", "show", "config").stdout, re.MULTILINE)
    return found[1].strip() if found else ""


def knows_pyxis() -> bool:
    return "--container-image" in ask("srun", "--help").stdout

"""The run's report: `report.json` for programs, as report.schema.json says, and `junit.xml` for pipelines.

    python -m functional.suite.report > functional/suite/report.schema.json

publishes the JSON Schema, which is made from the models here and from the classes of what they hold.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from functional.runtime.errors import ConfigError
from functional.runtime.fleet.programs import release_dir
from functional.runtime.fleet.sockets import ListeningSocket
from functional.runtime.refit.machine import Transition
from functional.runtime.refit.parts import ProbeVerdict, Replacement
from functional.runtime.rollout.requests import Join
from functional.suite.checklist import Check, Checklist
from functional.suite.data import DataRecord
from functional.suite.hardware import Hardware

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

Figure = float | None
"""A number; None where it was not finite, because JSON has neither NaN nor infinities."""


class Section(BaseModel):
    """A part of the report with a fixed set of keys."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)


class Build(BaseModel):
    """/opt/release/build.json, of which `inputs` is known here."""

    model_config = ConfigDict(extra="allow")

    inputs: dict[str, str] | None = Field(None, description="sha256 of everything that went into the image, by name.")


class Image(BaseModel):
    """/opt/release/image.json, of which `digest` is known here."""

    model_config = ConfigDict(extra="allow")

    digest: str | None = None


class Release(Section):
    """What the image says of itself; empty outside an image, without `image` outside a squashfs."""

    build: Build | None = None
    image: Image | None = None


class EngineOption(Section):
    """One engine option of the recipe, and what became of it; secrets replaced."""

    path: str
    value: Any
    kind: str
    outcome: str
    flags: list[str]
    warning: str | None
    error: str | None


class Refit(Section):
    """One policy update. `asked` and `version` differ after a return to the version before."""

    asked: int
    version: int | None
    attempts: int
    bytes_sent: int
    tensors: int
    proved: int = Field(description="Engine parameters that each worker has proved, on all its ranks.")
    proved_bytes: list[int] = Field(description="Bytes that each rank of a worker has proved.")
    by_plan: bool = Field(description="Whether the weights were copied in place, instead of by vLLM's loader.")
    no_plan: dict[str, str] = Field(description="Tensor, and why there is no plan for it.")
    phases: dict[str, float] = Field(description="Seconds by name, of the last attempt.")
    probes: list[ProbeVerdict]
    replaced: list[Replacement]
    total_s: float


class Step(BaseModel):
    """One optimizer step; beside these fields, the trainer's metrics by name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Figure]

    step: int
    samples: int
    truncated: int
    mean_reward: Figure = Field(description="Null where no sample has a reward.")


class CheckpointRecord(Section):
    """One checkpoint that was written."""

    step: int
    path: str
    bytes: int
    seconds: float


class ValidationRecord(Section):
    """One validation, by NeMo RL's names; `step` is the one that it came after."""

    step: int
    prompts: int
    generations: int
    accuracy: float = Field(description="Mean reward.")
    pass_k: float | None = Field(description="Mean of each prompt's best reward; null for one generation.")
    avg_length: float = Field(description="Tokens of a completion.")


class LostSample(Section):
    """A completion lost with its worker, and generated again."""

    step: int
    rollout: int
    reason: str


class NodePlace(Section):
    """A node in use, and what it holds. address: where other nodes reach it."""

    name: str
    address: str
    has_trainer: bool
    is_drivers: bool
    engines: list[int] = Field(description="Slots of its workers.")


class Topology(Section):
    """Which workers the run began with, and on what."""

    workers: dict[int, int] = Field(description="Instance ID by slot.")
    seeds: dict[int, list[int]] = Field(description="Seeds of every engine that the slot has had.")
    device: str
    trainer_ranks: int = Field(1, description="Devices that the trainer has.")
    share_gpu: bool
    note: str
    nodes: list[NodePlace]


class Asynchronous(Section):
    """What a run that generates while it trains did at once, from its first rollout to its last update. Seconds."""

    bound: int = Field(description="Policy versions that a sample may be behind the trainer.")
    in_flight_updates: bool = Field(description="Whether updates did not wait for the rollouts under way.")
    seconds: float
    training_s: float = Field(description="Optimizer steps, the scoring of older samples included.")
    generating_s: float = Field(description="At least one rollout was under way.")
    both_s: float = Field(description="Both at once.")
    trainer_waited_s: float = Field(description="The trainer waited for samples, or an update for rollouts to end.")
    trainer_idle_s: float = Field(description="No optimizer step: that wait, updates, validation, checkpoints.")
    engines_idle_s: float = Field(description="No rollout was under way.")
    ages: dict[int, int] = Field(description="Samples trained on, by how many policy versions they were behind.")
    spanning: int = Field(description="Of these, samples that were under way during an update.")
    unused: int = Field(description="Samples generated and not trained on.")


class FaultCase(Section):
    """A case of `functional refit-faults`, and how long it took."""

    case: str
    seconds: float


class ProbeRates(Section):
    """What `functional probe-rates` measured."""

    parameters: int
    noise: float = Field(description="Mean |engine − trainer| over the tokens, nats.")
    tokens: int
    seconds: dict[str, float] = Field(description="Median seconds of a round, by way of asking.")
    rates: list[dict[str, Figure]] = Field(description="One a size of the move.")


class NemoRlRun(Section):
    """What `functional run --driver nemo-rl` knows of the run beside its checks."""

    commit: str | None = Field(description="Of its tree; null where the tree is no checkout and no image names it.")
    changed: list[str] = Field(description="Files of the checkout that differ from the commit.")
    script_sha256: str
    recipe_file: str
    overrides: list[str] = Field(description="As given, secrets replaced.")
    share_gpu: bool = Field(description="Whether trainer and workers were on one GPU, a test topology.")
    reached: str = Field(description="The last milestone of its output.")
    refits: int
    cache_invalidations: int
    generation_tags: list[str] = Field(description="TensorBoard tags of the workers' metrics.")


class Report(Section):
    """Everything a run has to tell. A field without a value yet is left out of report.json."""

    schema_version: Literal[1]
    status: Literal["passed", "failed"]
    error: str | None = Field(description="Why the run ended early; null when it ran to its end.")
    release: Release
    checks: list[Check]
    phases: dict[str, float] = Field(description="Seconds by name, of bringing the run up.")
    refits: list[Refit]
    refit_transitions: list[Transition]
    steps: list[Step]
    lost_samples: list[LostSample]
    recipe: dict[str, Any] = Field(description="As resolved, secrets replaced.")
    versions: dict[str, dict[str, str]] = Field(description="Package versions by environment.")
    data: DataRecord
    options: list[EngineOption]
    warnings: list[str]
    fleet_phases: dict[str, float] | None = Field(None, description="Seconds since the fleet's start, by name.")
    topology: Topology | None = None
    parameters: int | None = Field(None, description="Of the trained model.")
    hardware: Hardware | None = Field(None, description="Of the driver's machine.")
    sockets: list[ListeningSocket] | None = None
    requests: Join | None = None
    resumed_from: int | None = Field(None, description="The step of the checkpoint that the run went on from.")
    checkpoints: list[CheckpointRecord] | None = None
    validations: list[ValidationRecord] | None = None
    asynchronous: Asynchronous | None = None
    fault_cases: list[FaultCase] | None = None
    probe_rates: ProbeRates | None = None
    nemo_rl: NemoRlRun | None = Field(None, description="Where NeMo RL's own trainer made the run.")
    seconds: float

    @classmethod
    def begin(
        cls,
        release: Release,
        recipe: dict[str, Any],
        versions: dict[str, dict[str, str]],
        data: DataRecord,
        options: list[EngineOption],
        warnings: list[str],
    ) -> "Report":
        """The report of a run that has only its inputs; it counts as failed until `finish` says otherwise."""
        return cls(
            schema_version=SCHEMA_VERSION,
            status="failed",
            error=None,
            release=release,
            checks=[],
            phases={},
            refits=[],
            refit_transitions=[],
            steps=[],
            lost_samples=[],
            recipe=recipe,
            versions=versions,
            data=data,
            options=options,
            warnings=warnings,
            seconds=0.0,
        )

    def finish(self, checks: Checklist, error: str | None, seconds: float) -> None:
        """Note the outcome. `error`: why the run ended early, None when it ran to its end; `seconds`: the run's."""
        self.checks = checks.checks
        self.error = error
        self.seconds = seconds
        self.status = "passed" if error is None and checks.passed else "failed"

    def as_json(self) -> str:
        """The content of report.json, in which numbers that are not finite are null."""
        plain = self.model_dump(mode="json", exclude_unset=True, fallback=str)
        return json.dumps(only_finite(plain), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def only_finite(value: Any) -> Any:
    """Plain data with None in place of NaN and infinities."""
    if isinstance(value, dict):
        return {key: only_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [only_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_report(out: Path, report: Report) -> None:
    """Write `out`/report.json and `out`/junit.xml."""
    write_atomically(out / "report.json", report.as_json())
    write_atomically(out / "junit.xml", junit(report))


def read_release() -> Release:
    """build.json and image.json of the image, as far as they are there. Raises ConfigError for one that is broken."""
    found: dict[str, Any] = {}
    for name, kind in (("build", Build), ("image", Image)):
        path = release_dir() / f"{name}.json"
        if not path.is_file():
            continue
        try:
            found[name] = kind.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ConfigError(f"{path}: {where}: {first['msg']}: this image is damaged, make it again") from error
    return Release(**found)


def junit(report: Report) -> str:
    """JUnit XML: one test case a check, and one called «run» for a run that ended early."""
    checks, error, seconds = report.checks, report.error, f"{report.seconds:.3f}"
    suite = ElementTree.Element(
        "testsuite",
        name="functional",
        tests=str(len(checks) + (error is not None)),
        failures=str(sum(not check.passed for check in checks)),
        errors=str(int(error is not None)),
        time=seconds,
    )
    if error is not None:
        run = ElementTree.SubElement(suite, "testcase", classname="functional", name="run", time=seconds)
        ElementTree.SubElement(run, "error", message=_printable(error.splitlines()[0])).text = _printable(error)
    for check in checks:
        case = ElementTree.SubElement(suite, "testcase", classname="functional", name=check.name)
        if check.passed:
            ElementTree.SubElement(case, "system-out").text = _printable(check.detail)
        else:
            ElementTree.SubElement(case, "failure", message=_printable(check.detail))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def json_schema() -> str:
    """The content of report.schema.json."""
    return json.dumps(Report.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def _printable(text: str) -> str:
    """XML 1.0 has no place for most control characters."""
    return "".join(c if c in "\n\t" or ord(c) >= 32 else "\ufffd" for c in text)


def write_atomically(path: Path, text: str) -> None:
    """Write to a temporary name beside `path`, sync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


if __name__ == "__main__":
    sys.stdout.write(json_schema())

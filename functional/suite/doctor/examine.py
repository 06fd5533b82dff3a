"""The guide's troubleshooting table as checks of a run's folder, one function a symptom, in the table's order."""

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil

from functional.suite.doctor.causes import MACHINE, REFIT, STARTING, Cause, first
from functional.suite.doctor.finding import Finding, Result
from functional.suite.doctor.folder import Move, RunFolder
from functional.suite.reserve import RESERVE_BYTES

RUN, READY, SCORE = "The run", "Frontend never becomes ready", "Training cannot score a completion"
HANGS, OUTPUT = "Refit hangs or fails", "Post-update output is inconsistent"
EXITS, REMAINS, MACHINE_ROW, OTHER = "Worker exits", "Shutdown leaves processes", "The machine", "Other checks"
SCORING = (".tokens_correct", ".requests_identified", ".requests_joined", ".token_mult_prob_error", ".logprobs_agree")
AFTER_UPDATE = (
    ".cache_clear_seen",
    ".probe_matches",
    ".generation",
    ".no_overlap_after_clear",
    ".stale_weights_refused",
)
TEARDOWN = (".nothing_left", ".orderly")
STALL_FACTOR = 1.5
"""How many times its own deadline a phase may take before it counts as stalled: the suite itself ends it at one."""
MANY_RETRIES = 0.01
LOW_SPACE = 0.02
CONTROL = ("etcd", "nats-server", "frontend")
_ENDED = re.compile(
    r"^(?P<name>etcd|nats-server|frontend|worker \d+)\S* (?P<how>was killed by \S+|exited with status \d+)"
)


def examine(run: RunFolder) -> list[Finding]:
    """At least one finding a symptom."""
    checks = (_run, _ready, _score, _refit, _output, _workers, _remains, _machine, _others)
    return [finding for check in checks for finding in check(run)]


def _run(run: RunFolder) -> Iterator[Finding]:
    looked = "report.json, processes.json, events.jsonl"
    at, doing = run.last_event()
    error = str(run.report.get("error") or "")
    if run.state == "running":
        yield from _stalled(run, at, doing)
    elif run.state == "dead":
        found = f"the driver ended without a report; it was last at «{doing}»"
        step = "killed (SIGKILL, out of memory, the job's end): dmesg, the scheduler's log; then start it again"
        yield Finding(RUN, Result.PROBLEM, "driver-killed", looked, found, step)
    elif error.startswith("stopped by"):
        yield Finding(RUN, Result.PROBLEM, "interrupted", looked, f"{error}, at «{doing}»", "start the run again")
    elif error:
        yield Finding(
            RUN, Result.PROBLEM, _word_of(error), looked, f"it ended early, at «{doing}»: {_line(error)}", _STEP
        )
    elif run.report.get("status") == "passed":
        yield Finding(RUN, Result.OK, "", looked, f"it came to its end, {len(run.report['checks'])} checks passed")
    else:
        failed = [check["name"] for check in run.report.get("checks", []) if not check["passed"]]
        found = f"it came to its end, but {len(failed)} check(s) failed: {', '.join(failed[:5])}"
        yield Finding(RUN, Result.PROBLEM, "checks-failed", looked, found, _STEP)


_STEP = "the rows below say more"


_TRAINER_GONE = re.compile(r"trainer rank \d+ of \d+: its process is gone")


def _word_of(error: str) -> str:
    if match := _ENDED.match(error):
        return f"{match['name'].split()[0]}-ended"
    if _TRAINER_GONE.match(error):
        return "trainer-ended"
    updating = error.startswith("update to policy version")
    cause = first((*MACHINE, *(REFIT if updating else STARTING)), error)
    return cause.word if cause else "ended-early"


def _stalled(run: RunFolder, at: float, doing: str) -> Iterator[Finding]:
    looked = "processes.json, events.jsonl, /proc"
    stopped = [f"{name} ({pid})" for name, pids in run.alive().items() for pid in pids if _is_stopped(pid)]
    if stopped:
        step = "somebody sent SIGSTOP, or a debugger holds it: kill -CONT PID, or end the run"
        yield Finding(RUN, Result.PROBLEM, "process-stopped", looked, f"stopped: {', '.join(stopped)}", step)
        return
    since, allowed = time.time() - at, _allowance(run, doing)
    if since > allowed * STALL_FACTOR:
        found = f"at «{doing}» for {since:.0f} s, though {allowed:.0f} s are allowed"
        yield Finding(
            RUN, Result.PROBLEM, "stalled", looked, found, "py-spy dump --pid DRIVER; then end the run by SIGTERM"
        )
    else:
        yield Finding(RUN, Result.OK, "", looked, f"running, at «{doing}» for {since:.0f} s (at most {allowed:.0f} s)")


def _allowance(run: RunFolder, doing: str) -> float:
    """Seconds until the suite itself ends what it is doing now."""
    generation = "policy.generation.dynamo_cfg"
    if doing.startswith("refit"):
        return run.setting(f"{generation}.control_timeout_s", 60.0)
    if "generating" in doing:
        return run.setting(f"{generation}.request_timeout_s", 60.0) + run.setting(
            f"{generation}.control_timeout_s", 60.0
        )
    return run.setting(f"{generation}.startup_timeout_s", 300.0)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _ready(run: RunFolder) -> Iterator[Finding]:
    """etcd and NATS, worker exits, the registrations expected, /v1/models."""
    looked = "report.json (fleet_phases), logs of etcd, NATS, frontend and workers"
    error = str(run.report.get("error") or "")
    came_up = any(row["event"].startswith("refit 0") for row in run.files.events)
    if (match := _ENDED.match(error)) and match["name"] in CONTROL:
        step = f"logs/{match['name']}.log; SIGKILL: somebody's, or out of memory (dmesg). Start the run again"
        yield Finding(READY, Result.PROBLEM, f"{match['name']}-ended", looked, f"{match['name']} {match['how']}", step)
    elif came_up:
        phases = run.report.get("fleet_phases") or {}
        took = f" after {phases['model routed']:.0f} s" if "model routed" in phases else ""
        yield Finding(READY, Result.OK, "", looked, f"all workers registered and the model was routed{took}")
        if run.state == "running":
            yield _asked_frontend(run)
    elif error:
        yield _not_up(run, looked, error)
    elif run.files.event("fleet: starting") is None:
        where = "the run ended before the fleet" if run.state != "running" else "the fleet is not started yet"
        yield Finding(READY, Result.UNKNOWN, "", looked, where)
    elif run.state == "running":
        yield Finding(READY, Result.OK, "", looked, "the fleet is coming up")
    else:
        yield _not_up(run, looked, error)


def _not_up(run: RunFolder, looked: str, error: str) -> Finding:
    """Why a fleet did not come up: the first log that shows a known cause, else what the run's own error says."""
    for name, text in [(log.name, run.log_end(log)) for log in run.logs()] + [("report.json", error)]:
        if cause := first(STARTING, text):
            found = f"{cause.meaning} ({name}: {_quoted(cause, text)})"
            return Finding(READY, Result.PROBLEM, cause.word, looked, found, cause.next_step)
    if run.state == "dead":
        return Finding(READY, Result.UNKNOWN, "", looked, "the driver ended while the fleet was coming up")
    if error.startswith("stopped by"):
        return Finding(READY, Result.UNKNOWN, "", looked, "the run was told to stop while the fleet was coming up")
    step = "the quoted log from its first error on"
    return Finding(READY, Result.PROBLEM, "startup-failed", looked, _line(error) or "it did not come up", step)


def _asked_frontend(run: RunFolder) -> Finding:
    """What the frontend of a running run answers now."""
    expected = sum(name.startswith("worker-") for name in run.processes)
    for port in _ports(run.processes.get("frontend", [])):
        try:
            health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=3, trust_env=False).json()
            models = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=3, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            continue
        there = sum(one.get("endpoint") == "generate" for one in health.get("instances", []))
        names = [model["id"] for model in models.get("data", [])]
        looked = f"GET /health and /v1/models on port {port}"
        if there == expected and names:
            return Finding(READY, Result.OK, "", looked, f"{there} worker(s) registered; models: {', '.join(names)}")
        found = f"{there} of {expected} worker(s) registered; models: {', '.join(names) or 'none'}"
        return Finding(READY, Result.PROBLEM, "not-registered", looked, found, "the missing worker's log")
    step = "frontend.log; nothing replaces the frontend, so that the run will end"
    return Finding(READY, Result.PROBLEM, "frontend-silent", "the frontend's ports", "no answer to GET /health", step)


def _ports(pids: list[int]) -> list[int]:
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return sorted({one.laddr.port for one in listening if one.pid in pids and one.laddr.ip == "127.0.0.1"})


def _score(run: RunFolder) -> Iterator[Finding]:
    """Token IDs, lengths of log-probs, tokenizer, response adapter."""
    looked = "rollouts.jsonl, requests.jsonl, the checks on tokens and log-probs"
    reasons = Counter(str(row["reason"]) for row in run.files.rollouts if not row.get("accepted", True))
    if reasons:
        reason, count = reasons.most_common(1)[0]
        step = "token IDs or log-probs missing: the worker needs --enable-rl and DYN_ENABLE_EXPERIMENTAL_PARSERS_V2=1"
        found = f"{sum(reasons.values())} of {len(run.files.rollouts)} samples refused; {count}: {reason}"
        yield Finding(SCORE, Result.PROBLEM, "samples-refused", looked, found, step)
    failed = [check for check in run.checks(*SCORING) if not check["passed"]]
    apart = [check for check in failed if check["name"].endswith((".token_mult_prob_error", ".logprobs_agree"))]
    wrong = [check for check in failed if check not in apart]
    if wrong:
        step = "the reason stands with the sample in rollouts.jsonl"
        yield Finding(SCORE, Result.PROBLEM, "tokens-incorrect", looked, _all_of(wrong), step)
    if apart:
        step = (
            "the same model folder and tokenizer on both sides? a VLLM_* variable in env_vars that takes other kernels?"
            " a bound in checks.* below the model's own rounding?"
        )
        yield Finding(SCORE, Result.PROBLEM, "engine-trainer-apart", looked, _all_of(apart), step)
    if not reasons and not failed:
        done = len(run.files.rollouts)
        state = Result.OK if done else Result.UNKNOWN
        yield Finding(
            SCORE, state, "", looked, f"{done} samples, each with token IDs and log-probs" if done else "no sample yet"
        )
    yield from _retries(run)


def _retries(run: RunFolder) -> Iterator[Finding]:
    retried = sum(row["outcome"] == "retried" for row in run.files.requests)
    if retried > MANY_RETRIES * max(len(run.files.requests), 1):
        found = f"{retried} of {len(run.files.requests)} requests were sent again"
        result = Result.PROBLEM if run.report.get("error") else Result.RECOVERED
        step = "frontend.log around those times: a proxy, a full queue, or a worker that ended"
        yield Finding(SCORE, result, "connections-broken", "requests.jsonl", found, step)


def _refit(run: RunFolder) -> Iterator[Finding]:
    """The worker list, the group, the patch, the first failed worker's result."""
    looked = "transitions in events.jsonl, versions and patches in report.json"
    moves = run.moves()
    yield from _attempts(run, moves, looked)
    versions = run.report.get("versions", {})
    pair = [versions.get(side, {}).get("nvidia-nccl-cu13") for side in ("trainer", "dynamo")]
    if all(pair) and pair[0] != pair[1]:
        step = "build the image from its locks: both must have the same"
        yield Finding(
            HANGS, Result.PROBLEM, "nccl-differs", looked, f"NCCL {pair[0]} in the trainer, {pair[1]} in Dynamo", step
        )
    patches = ((run.report.get("release") or {}).get("build") or {}).get("patches") or []
    for patch in patches:
        if not patch.get("applies", True):
            found = f"patch {patch.get('name')} is for vLLM {patch.get('for')}, installed is {patch.get('installed')}"
            yield Finding(HANGS, Result.PROBLEM, "patch-missing", looked, found, "build the image with the locked vLLM")


def _attempts(run: RunFolder, moves: list[Move], looked: str) -> Iterator[Finding]:
    """Of every cause that attempts failed of, one finding."""
    failed = [move for move in moves if move.after == "recovering"]
    stopped = next((move for move in moves if move.after == "stopped"), None)
    by_cause: dict[str, tuple[Cause | None, list[Move]]] = {}
    for move in failed:
        cause = first(REFIT, move.reason)
        by_cause.setdefault(cause.word if cause else "update-failed", (cause, []))[1].append(move)
    for word, (cause, held) in by_cause.items():
        ended = [one for one in moves if one.time >= held[-1].time and one.after in ("serving", "stopped")]
        well = bool(ended) and ended[0].after == "serving"
        found = f"{len(held)} attempt(s) failed while {held[0].before}, the first: {_line(held[0].reason)}"
        meaning = f"{cause.meaning}; {found}" if cause else found
        result = Result.RECOVERED if well else Result.PROBLEM
        step = cause.next_step if cause else "the first failed worker's log"
        yield Finding(
            HANGS, result, word, looked, f"{meaning}; afterwards {ended[0].after if ended else 'nothing'}", step
        )
    if stopped is not None:
        step = "admission stays closed; the first failure above is the one to look at"
        yield Finding(HANGS, Result.PROBLEM, "update-given-up", looked, f"no way on: {_line(stopped.reason)}", step)
    if not failed and stopped is None:
        done = sum(move.after == "serving" for move in moves)
        if moves and moves[-1].after not in ("serving", "stopped") and run.state == "dead":
            found = (
                f"the driver ended in the middle of the update to version {moves[-1].version}, while {moves[-1].after}"
            )
            step = "nothing was sampled from it; the trainer's checkpoint is the last proved state"
            yield Finding(HANGS, Result.PROBLEM, "died-updating", looked, found, step)
        else:
            state = Result.OK if done else Result.UNKNOWN
            yield Finding(HANGS, state, "", looked, f"{done} update(s) done, none failed" if done else "no update yet")


def _output(run: RunFolder) -> Iterator[Finding]:
    """Refit count, cache invalidation, pause and resume, the sample after an update."""
    looked = "the checks on cache clears, probes and the generation after the last update"
    held = run.checks(*AFTER_UPDATE)
    failed = [check for check in held if not check["passed"]]
    if failed:
        step = "stale prefixes or weights: keep admission closed; logs of the worker named, and docs/refit.md"
        yield Finding(OUTPUT, Result.PROBLEM, "output-inconsistent", looked, _all_of(failed), step)
    steps, versions = len(run.report.get("steps", [])), [one.get("version") for one in run.report.get("refits", [])]
    if not failed:
        state = Result.OK if held else Result.UNKNOWN
        found = (
            f"{len(held)} checks passed; {steps} step(s), versions {_short(versions)}"
            if held
            else "nothing to judge yet"
        )
        yield Finding(OUTPUT, state, "", looked, found)


def _short(versions: list[object]) -> str:
    return ", ".join(map(str, versions)) if len(versions) <= 6 else f"{versions[0]} to {versions[-1]}"


def _workers(run: RunFolder) -> Iterator[Finding]:
    """Ray actor, GPU reservation, process group, registration."""
    looked = "report.json (refits), events.jsonl, worker-*.log, usage.jsonl"
    replaced = [one for refit in run.report.get("refits", []) for one in refit.get("replaced", [])]
    for one in replaced:
        found = f"worker {one['worker']} ended ({_line(one['reason'])}) and was replaced in {one['seconds']:.0f} s"
        yield Finding(
            EXITS, Result.RECOVERED, "worker-lost", looked, found, _after_kill(run, f"worker-{one['worker']}")
        )
    error = str(run.report.get("error") or "")
    match = _ENDED.match(error)
    if match and match["name"].startswith("worker"):
        log = run.out / "logs" / f"{match['name'].replace(' ', '-')}.log"
        cause = first((*STARTING, *MACHINE), f"{error}\n{run.log_end(log)}")
        found = f"{match['name']} {match['how']}" + (
            f": {cause.meaning} ({_quoted(cause, run.log_end(log))})" if cause else ""
        )
        step = cause.next_step if cause else _after_kill(run, match["name"].replace(" ", "-"))
        yield Finding(EXITS, Result.PROBLEM, cause.word if cause else "worker-ended", looked, found, step)
    elif "Ray cannot reserve" in error:
        step = "ray status; another job holds devices that cluster.gpus_per_node counts on"
        yield Finding(EXITS, Result.PROBLEM, "no-reservation", looked, _line(error), step)
    elif "membership changed" in error:
        step = "the worker's log; an unknown one is a leftover connected to the same etcd"
        yield Finding(EXITS, Result.PROBLEM, "membership-changed", looked, _line(error), step)
    elif not replaced:
        yield from _gone_now(run, looked)


def _gone_now(run: RunFolder, looked: str) -> Iterator[Finding]:
    names = [name for name in run.processes if name != "driver"]
    gone = [name for name in names if run.state == "running" and name not in run.alive()]
    if gone:
        step = "their logs; a worker is replaced at the next update, the rest ends the run"
        yield Finding(EXITS, Result.PROBLEM, "process-gone", looked, f"not there any more: {', '.join(gone)}", step)
    else:
        workers = sum(name.startswith("worker-") for name in names)
        state = Result.OK if workers else Result.UNKNOWN
        yield Finding(EXITS, state, "", looked, f"{workers} worker(s), none ended" if workers else "no worker yet")


def _after_kill(run: RunFolder, name: str) -> str:
    """Whether memory was short, as the samples tell: the kernel's log needs rights that the run may lack."""
    total = ((run.report.get("hardware") or {}).get("memory_bytes")) or psutil.virtual_memory().total
    most = max((sum(part[1] for part in row["parts"].values()) for row in run.files.usage), default=0)
    if most > 0.9 * total:
        return (
            f"the run held {most / 2**30:.1f} of {total / 2**30:.1f} GiB: out of memory is likely (dmesg); {name}.log"
        )
    held = f", though the run held {most / 2**30:.1f} GiB" if most else ""
    return f"logs/{name}.log; by SIGKILL: somebody's, or out of memory (dmesg){held}"


def _remains(run: RunFolder) -> Iterator[Finding]:
    """Processes, ports and folders of a run that is over."""
    looked = "the teardown checks, processes.json against /proc, the run's temporary folder"
    failed = [check for check in run.checks(*TEARDOWN) if not check["passed"]]
    for check in failed:
        step = "what is named; the next run takes other ports, and a guard ends processes right after"
        yield Finding(REMAINS, Result.PROBLEM, "left-behind", looked, f"{check['name']}: {check['detail']}", step)
    if run.state == "running":
        yield Finding(REMAINS, Result.OK, "", looked, "the run is not over")
        return
    alive = [f"{name} ({', '.join(map(str, pids))})" for name, pids in run.alive().items()]
    folder = run.run_dir is not None and run.run_dir.exists()
    if alive or folder:
        found = "; ".join([*alive, *([f"folder {run.run_dir}"] if folder else [])])
        step = "end them by id, then remove the folder; look for a guard process that was killed too"
        yield Finding(REMAINS, Result.PROBLEM, "left-behind", looked, f"still there: {found}", step)
    elif not failed:
        yield Finding(REMAINS, Result.OK, "", looked, "no process and no folder of the run is left on this machine")


def _machine(run: RunFolder) -> Iterator[Finding]:
    looked = "the ends of all logs, free space of the folder's file system"
    found = False
    texts = [(log.name, run.log_end(log)) for log in run.logs()] + [("report.json", str(run.report.get("error") or ""))]
    for cause in MACHINE:
        for name, text in texts:
            if cause.pattern.search(text):
                found = True
                healthy = run.report.get("status") == "passed"
                result = Result.RECOVERED if healthy else Result.PROBLEM
                yield Finding(
                    MACHINE_ROW,
                    result,
                    cause.word,
                    looked,
                    f"{cause.meaning} ({name}: {_quoted(cause, text)})",
                    cause.next_step,
                )
                break
    for name, why in run.files.broken.items():
        found = True
        yield Finding(
            MACHINE_ROW, Result.PROBLEM, "broken-file", looked, f"{name}: {why}", "a full disk, or a hand in the folder"
        )
    space = shutil.disk_usage(run.out)
    if space.free < RESERVE_BYTES and run.report.get("status") != "passed" and not found:
        found = True
        text = f"{space.free / 2**20:.1f} MiB are free where the run writes"
        step = "free space, and run again; what the run wrote last may be cut off"
        yield Finding(MACHINE_ROW, Result.PROBLEM, "disk-full", looked, text, step)
    elif space.free < LOW_SPACE * space.total and run.state == "running":
        found = True
        text = f"{space.free / 2**30:.1f} GiB are free where the run writes"
        yield Finding(
            MACHINE_ROW, Result.PROBLEM, "disk-low", looked, text, "free space before the run ends for want of it"
        )
    if not found:
        cores = len(os.sched_getaffinity(0))
        text = f"no log speaks of disk, lease, memory or file limits; {cores} cores, {space.free / 2**30:.0f} GiB free"
        yield Finding(MACHINE_ROW, Result.OK, "", looked, text)


def _others(run: RunFolder) -> Iterator[Finding]:
    known = SCORING + AFTER_UPDATE + TEARDOWN
    others = [check for check in run.report.get("checks", []) if not check["name"].endswith(known)]
    failed = [check for check in others if not check["passed"]]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for check in failed:
        by_kind.setdefault(check["name"].rpartition(".")[2], []).append(check)
    for kind, held in by_kind.items():
        word, step = _OF_CHECKS.get(kind, ("check-failed", "docs/troubleshooting.md"))
        yield Finding(OTHER, Result.PROBLEM, word, "report.json", _all_of(held), step)
    if not failed:
        state = Result.OK if others else Result.UNKNOWN
        yield Finding(OTHER, state, "", "report.json", f"{len(others)} passed" if others else "no report")


_OF_CHECKS = {
    "rewards_differ": (
        "no-signal",
        "every group has one reward: take harder or easier prompts, or more generations each",
    ),
    "policy_moved": (
        "policy-still",
        "the step moves nothing: learning rate, advantages, gradient norm in metrics.jsonl",
    ),
    "no_wildcard_listener": ("wildcard-listener", "a program listens on all interfaces: an option in extra_cli_args?"),
    "every_worker_served": ("worker-idle", "fewer requests than workers, or a router mode that leaves one out"),
    "cache_events": ("no-cache-events", "workers' --kv-events-config, and NATS; without events the router is blind"),
    "seeds_differ": ("equal-seeds", "two engines have one seed: each must get its own"),
    "polled": ("telemetry-failed", "worker and frontend answered no metrics: their logs at that time"),
    "weights_proved": ("weights-not-proved", "the worker's log, and the patches in /opt/release/build.json"),
    "version_reached": ("update-failed", "the transitions in report.html name the failed worker first"),
}


def _quoted(cause: Cause, text: str) -> str:
    match = cause.pattern.search(text)
    if match is None:
        return ""
    start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    return _line(text[start : end if end >= 0 else None])


def _all_of(checks: list[dict[str, Any]]) -> str:
    """The first in full, and how many more there are."""
    more = f"; and {len(checks) - 1} more, the last {checks[-1]['name']}" if len(checks) > 1 else ""
    return f"{checks[0]['name']}: {_line(checks[0]['detail'])}{more}"


def _line(text: str) -> str:
    return " ".join(text.split())[:240]

"""One run of NeMo RL's own script: resolve its recipe, run it, check its logs and metrics, take all down, report.

    python -m functional.suite.nemo_rl.driver RECIPE OUT RUN_DIR OPTIONS_AS_JSON [key=value …]

`functional run --driver nemo-rl` starts this under a guard. RUN_DIR is an empty folder that goes away with the run.
"""

import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functional.runtime.errors import ConfigError, InterruptedRunError, RunError
from functional.runtime.fleet.guard import PR_SET_CHILD_SUBREAPER, descendants
from functional.runtime.fleet.sockets import ListeningSocket, command_line
from functional.runtime.jsonlines import write_whole
from functional.runtime.recipe.redact import redacted, scrubber
from functional.suite.checklist import Checklist
from functional.suite.cluster import check_address, cluster_address
from functional.suite.data import DataRecord
from functional.suite.hardware import read_hardware
from functional.suite.leftovers import find_leftovers
from functional.suite.nemo_rl import end_on_nodes, read_config, read_events
from functional.suite.nemo_rl.checks import (
    GENERATION,
    Events,
    check_end,
    check_generation_metrics,
    check_refits,
    check_steps,
    check_token_error,
    check_versions,
    steps_of,
)
from functional.suite.nemo_rl.launch import RUN_VARIABLE, Ended, make_environment, ray_head, run_script, shared_gpu
from functional.suite.nemo_rl.log import NemoRlLog
from functional.suite.nemo_rl.network import enter_own_network, has_route
from functional.suite.nemo_rl.place import NemoRl, find_nemo_rl, find_recipe, tree_state
from functional.suite.outcome import make_folders, summarize, write_pages_or_say
from functional.suite.report import NemoRlRun, Report, read_release, write_atomically, write_report
from functional.suite.reserve import Reserve
from functional.suite.versions import DYNAMO_PACKAGES, TRAINER_PACKAGES, versions_in

OWN_FOLDER = "nemo-rl"
"""In the run's folder: what NeMo RL writes itself."""
TRAINER = (*TRAINER_PACKAGES, "nccl4py", "datasets", "tensordict")
SERVICES = ("dynamo.frontend", "dynamo.vllm", "/bin/etcd", "/bin/nats-server", "VLLM::")
"""In the command lines of what NeMo RL's managed Dynamo starts."""
READ_TIMEOUT_S = 180.0
LEFT_WAIT_S = 20.0


@dataclass(frozen=True)
class Options:
    """deadline_s: for the script; token_error: train/token_mult_prob_error has to stay below; share_gpu: trainer and
    workers take this machine's first GPU."""

    deadline_s: float = 3600.0
    token_error: float = 1.05
    share_gpu: bool = False


@dataclass(frozen=True)
class Prepared:
    """config: the recipe as NeMo RL resolves it; words: what its script is given."""

    place: NemoRl
    recipe: Path
    config: dict[str, Any]
    words: list[str]
    environment: dict[str, str]


def run(recipe: Path, out: Path, run_dir: Path, options: Options, overrides: list[str]) -> int:
    """Run the script and write `out`/report.json, report.html, report.md, junit.xml, logs/ and nemo-rl/.

    Returns 0 when every check passed, 1 when not, 2 for a bad recipe or environment.
    """
    adopt_orphans()
    began = time.monotonic()
    try:
        prepared = prepare(recipe, out, run_dir, options, overrides)
        report = begin_report(prepared, options, overrides)
        if cluster_address() is None and not has_route():
            enter_own_network()
            report.warnings.append("the machine has no default route: the run had a network of its own")
        log_dir, reserve = prepare_out(out, report)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except InterruptedRunError as told:
        print(f"error: {told}", file=sys.stderr)
        return 1
    checks = Checklist()
    failure = carry_out(prepared, options, report, checks, log_dir, run_dir, reserve)
    report.finish(checks, failure, time.monotonic() - began)
    write_report(out, report)
    write_pages_or_say(out)
    summarize(report, out)
    return 0 if report.status == "passed" else 1


def prepare_out(out: Path, report: Report) -> tuple[Path, Reserve]:
    """The folder for logs, and what is kept free for the end. Raises ConfigError where `out` cannot be written to."""
    try:
        log_dir = make_folders(out)
        shutil.rmtree(out / OWN_FOLDER, ignore_errors=True)
        reserve = Reserve(out)
        write_atomically(out / "recipe.json", json.dumps(report.recipe, indent=2) + "\n")
    except OSError as error:
        where = error.filename or out
        raise ConfigError(f"{where}: {error.strerror}: name a folder with room, to write to, as --out") from error
    return log_dir, reserve


def prepare(recipe: Path, out: Path, run_dir: Path, options: Options, overrides: list[str]) -> Prepared:
    """Find NeMo RL and resolve the recipe with it. Raises ConfigError for what could not give a run to check."""
    place = find_nemo_rl()
    file = find_recipe(recipe, place.tree)
    for override in overrides:
        key, equals, _ = override.lstrip("+~").partition("=")
        if not equals:
            raise ConfigError(f"{override!r}: an override is key=value")
        if key == "logger.log_dir":
            raise ConfigError("logger.log_dir: set by --out; leave it out")
    words = [*overrides, f"++logger.log_dir='{out / OWN_FOLDER}'"]
    environment = make_environment(place, run_dir)
    config = resolve(place, file, words, environment, run_dir)
    check_config(file, config)
    if (address := cluster_address()) is not None:
        check_address(address)
    if options.share_gpu:
        if int(config["cluster"]["num_nodes"]) > 1:
            raise ConfigError(f"{file}: cluster.num_nodes: --share-gpu is for one node")
        environment |= shared_gpu(int(config["cluster"]["gpus_per_node"]))
    return Prepared(place, file, config, ["--config", str(file), *words], environment)


def resolve(place: NemoRl, recipe: Path, words: list[str], environment: Mapping[str, str], run_dir: Path) -> Any:
    """The recipe as NeMo RL itself resolves it. Raises ConfigError with its last line when it refuses."""
    answer = run_dir / "config.json"
    ask(place, [read_config.__file__, str(recipe), str(answer), *words], environment, f"NeMo RL refuses {recipe}")
    return json.loads(answer.read_bytes())


def ask(place: NemoRl, words: list[str], environment: Mapping[str, str], problem: str) -> None:
    """Run one of the scripts here by NeMo RL's Python. Raises ConfigError with the last line of its complaint."""
    command = [str(place.python), *words]
    try:
        answer = subprocess.run(
            command, cwd=place.tree, env=dict(environment), capture_output=True, text=True, timeout=READ_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{problem}: no answer within {READ_TIMEOUT_S:.0f} s") from error
    if answer.returncode:
        lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        raise ConfigError(f"{problem}: {lines[-1][:500] if lines else f'status {answer.returncode}'}")


def check_config(recipe: Path, config: Any) -> None:
    """Raises ConfigError for a recipe of which nothing here could be checked."""
    try:
        backend = config["policy"]["generation"]["backend"]
        has_metrics = config["logger"]["tensorboard_enabled"]
        is_async = config["grpo"]["async_grpo"]["enabled"]
        bool(config["grpo"]["async_grpo"]["recompute_kv_cache_after_weight_updates"])
        for section, key in (
            ("cluster", "gpus_per_node"),
            ("cluster", "num_nodes"),
            ("grpo", "max_num_steps"),
            ("grpo", "num_prompts_per_step"),
            ("grpo", "num_generations_per_prompt"),
        ):
            int(config[section][key])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{recipe}: not a GRPO recipe of NeMo RL: {type(error).__name__}: {error}") from error
    if backend != "dynamo":
        raise ConfigError(f"{recipe}: policy.generation.backend={backend}: this driver checks runs with dynamo")
    if not has_metrics:
        raise ConfigError(
            f"{recipe}: logger.tensorboard_enabled=false: the metrics are read from there; set it to true"
        )
    if not is_async:
        raise ConfigError(f"{recipe}: grpo.async_grpo.enabled=false: its refits are not logged; set it to true")


def begin_report(prepared: Prepared, options: Options, overrides: list[str]) -> Report:
    """The report of a run with these inputs. Raises ConfigError when the image is damaged."""
    place = prepared.place
    commit, changed = tree_state(place.tree)
    versions = {
        "trainer": versions_in(place.python, TRAINER),
        "dynamo": versions_in(place.dynamo_python, DYNAMO_PACKAGES),
    }
    report = Report.begin(
        release=read_release(),
        recipe=redacted(prepared.config),
        versions=versions,
        data=describe_data(prepared.config),
        options=[],
        warnings=[f"{place.tree}: {len(changed)} file(s) differ from commit {commit}"] if changed else [],
    )
    report.hardware = read_hardware()
    report.nemo_rl = NemoRlRun(
        commit=commit,
        changed=changed[:50],
        script_sha256=hashlib.sha256(place.script.read_bytes()).hexdigest(),
        recipe_file=str(prepared.recipe),
        overrides=redacted(overrides),
        share_gpu=options.share_gpu,
        reached="start",
        refits=0,
        cache_invalidations=0,
        generation_tags=[],
    )
    return report


def describe_data(config: Mapping[str, Any]) -> DataRecord:
    """What the recipe trains on; hashed where it is a file here. Raises ConfigError for a file that is not there."""
    train = config["data"]["train"]
    first = train[0] if isinstance(train, list) else train
    name, path = first.get("dataset_name") or config["data"]["default"].get("dataset_name"), first.get("data_path")
    if path is None:
        return DataRecord(str(name), "Hugging Face, by name", None, None)
    file = Path(path)
    if not file.is_file():
        if path.startswith("/"):
            raise ConfigError(f"data.train.data_path: {path}: no such file")
        return DataRecord(str(name), str(path), None, None)
    content = file.read_bytes()
    lines = sum(bool(line.strip()) for line in content.splitlines()) if file.suffix == ".jsonl" else None
    return DataRecord(str(name), "file", lines, hashlib.sha256(content).hexdigest())


def carry_out(
    prepared: Prepared,
    options: Options,
    report: Report,
    checks: Checklist,
    log_dir: Path,
    run_dir: Path,
    reserve: Reserve,
) -> str | None:
    """Run the script with its Ray head, check what it logged and left. Returns why it ended early, if it did."""
    out = log_dir.parent
    scrub = scrubber({"recipe": prepared.config, "environment": secrets_of(prepared.environment)})
    began, log = time.monotonic(), NemoRlLog()
    ended: Ended | None = None
    left: list[str] = []
    failure: str | None = None
    gpus = int(prepared.config["cluster"]["gpus_per_node"]) if options.share_gpu else None
    with (log_dir / "run_grpo.log").open("wb", buffering=0) as file:

        def heard(line: str) -> None:
            seconds = time.monotonic() - began
            try:
                write_whole(file, f"{scrub(line)}\n".encode())
            except OSError as error:
                raise RunError(f"{file.name}: {error.strerror}, so the script was stopped: df -h {out}") from error
            if name := log.feed(line, seconds):
                with suppress(OSError):
                    print(f"{seconds:6.1f} s  {name}", flush=True)

        try:
            with ray_head(prepared.place, prepared.environment, run_dir, log_dir / "ray.log", gpus) as environment:
                print(f"{time.monotonic() - began:6.1f} s  ray", flush=True)
                ended = run_script(prepared.place, prepared.words, environment, options.deadline_s, heard)
                left = left_by_dynamo(run_dir)
        except RunError as fault:
            failure = scrub(str(fault))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what follows is bounded, and must not be cut short
            reserve.give_back()
    report.phases = dict(log.milestones)
    if ended is not None:
        failure = check_end(checks, ended, log, options.deadline_s)
        failure = scrub(failure) if failure else None
        report.sockets = ended.sockets
        try:
            check_logged(prepared, options, report, checks, log, out, run_dir)
        except (RunError, OSError, ValueError) as unread:
            failure = failure or scrub(f"its metrics could not be checked: {unread}")
    if (address := cluster_address()) is not None:
        left += left_on_nodes(prepared, address, run_dir)
    await_end()
    shutil.rmtree(run_dir, ignore_errors=True)
    left += find_leftovers(run_dir, {socket.port for socket in ended.sockets} if ended else ())
    checks.add(
        "teardown.nothing_left", not left, "; ".join(left[:5]) or "no process, port or folder of the run is left"
    )
    return failure


def left_by_dynamo(run_dir: Path) -> list[str]:
    """What of its Dynamo services outlived the script, given LEFT_WAIT_S seconds to end."""
    deadline = time.monotonic() + LEFT_WAIT_S
    while (found := _dynamo_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    found += [f"folder {path}" for path in (run_dir / "tmp").glob("nemorl_dynamo_*")]
    return [f"after the script's end: {what}" for what in found]


def _dynamo_processes() -> list[str]:
    commands = [(pid, command_line(pid)) for pid in descendants(os.getpid())]
    return [f"process {pid}: {line[:120]}" for pid, line in commands if any(mark in line for mark in SERVICES)]


def left_on_nodes(prepared: Prepared, address: str, run_dir: Path) -> list[str]:
    """What of the run outlived its script on the nodes of a cluster that was there before, where its actors are no
    descendants of ours; ended, and named. That they could not be looked at counts as something left."""
    answer = run_dir / "nodes.json"
    mark = f"{RUN_VARIABLE}={prepared.environment[RUN_VARIABLE]}"
    environment = {name: value for name, value in prepared.environment.items() if name != RUN_VARIABLE}
    try:
        check_address(address)
        words = [end_on_nodes.__file__, mark, str(LEFT_WAIT_S), str(answer)]
        ask(prepared.place, words, environment, "the cluster's nodes could not be looked at")
    except ConfigError as unseen:
        return [str(unseen)]
    found = json.loads(answer.read_bytes())
    return [f"after the script's end, on {node}: {what}" for node, lines in found.items() for what in lines]


def await_end() -> None:
    """Ray's processes end a moment after their head; what does not is found as left."""
    deadline = time.monotonic() + LEFT_WAIT_S
    while descendants(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.1)


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may hold a secret: a shell's own folders (PWD, OLDPWD) are none, whatever they are called."""
    return {name: value for name, value in environment.items() if not name.endswith("PWD")}


def adopt_orphans() -> None:
    """What the script leaves behind becomes this process's child, and so is found."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def interrupt(_signum: int, _frame: object) -> None:
    """Signal handler: ends the run in order."""
    raise InterruptedRunError("the run was told to stop")


def check_logged(
    prepared: Prepared, options: Options, report: Report, checks: Checklist, log: NemoRlLog, out: Path, run_dir: Path
) -> None:
    """The checks of the log and of the metrics; what they rest on goes into the report."""
    grpo = prepared.config["grpo"]
    events = read_metrics(prepared, out / OWN_FOLDER, run_dir)
    report.steps = steps_of(events, grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"])
    check_steps(checks, events, int(grpo["max_num_steps"]))
    check_refits(checks, log, len(events.steps), grpo["async_grpo"]["recompute_kv_cache_after_weight_updates"])
    check_token_error(checks, events, options.token_error, log.filtered)
    check_generation_metrics(checks, events)
    check_versions(checks, report.versions)
    assert report.nemo_rl is not None
    report.nemo_rl.reached = log.reached
    report.nemo_rl.refits = log.refits
    report.nemo_rl.cache_invalidations = log.invalidations
    report.nemo_rl.generation_tags = [tag for tag in events.tags if tag.startswith(GENERATION)]
    wide = sorted({f"{program_of(s)}:{s.port}" for s in report.sockets or [] if s.is_wildcard})
    if wide:
        report.warnings.append(f"NeMo RL's servers listened on every interface, unauthenticated: {', '.join(wide)}")


def program_of(socket: ListeningSocket) -> str:
    """Its name; of a process that has ended there is none."""
    return (socket.program.split() or ["?"])[0].rpartition("/")[2]


def read_metrics(prepared: Prepared, folder: Path, run_dir: Path) -> Events:
    """What the run wrote for TensorBoard; nothing where it came to none."""
    if not any(folder.rglob("*tfevents*")):
        return Events({}, [])
    answer = run_dir / "events.json"
    words = [read_events.__file__, str(folder), str(answer)]
    ask(prepared.place, words, prepared.environment, f"cannot read {folder}")
    found = json.loads(answer.read_bytes())
    scalars = {tag: [(int(step), float(value)) for step, value in points] for tag, points in found["scalars"].items()}
    return Events(scalars, found["tags"])


def main(words: list[str]) -> int:
    """The command line that is described above."""
    recipe, out, run_dir, options, *overrides = words
    return run(Path(recipe), Path(out), Path(run_dir), Options(**json.loads(options)), overrides)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main(sys.argv[1:]))

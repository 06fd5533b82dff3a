"""One run from bring-up to its last check: the fleet, the trainer, the recipe's steps, and what each is checked for."""

import json
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from functional.runtime.chat.server import ChatServer
from functional.runtime.errors import ConfigError, InterruptedRunError, RolloutError, RunError
from functional.runtime.fleet.fleet import Fleet
from functional.runtime.fleet.guard import descendants
from functional.runtime.fleet.programs import Programs
from functional.runtime.fleet.remains import Traces
from functional.runtime.fleet.settings import FleetSettings, new_namespace
from functional.runtime.fleet.sockets import NodeSockets
from functional.runtime.fleet.worker import Worker
from functional.runtime.jsonlines import JsonLines
from functional.runtime.recipe.architectures import find_model_problem, read_config
from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.parser_check import EngineCheck
from functional.runtime.recipe.rules import TOOL_DATA, Problem, layout_problems, merge_stop_strings
from functional.runtime.refit.machine import Event, State, Transition
from functional.runtime.refit.parts import Probe, RefitResult
from functional.runtime.refit.probe import TOKENS, probe_prompt
from functional.runtime.refit.transaction import FleetRefit
from functional.runtime.rollout.client import Limits, RolloutClient
from functional.runtime.rollout.completion import NO_TOP_K, Completion, Sampling
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.generation import AskedType, Completer, FoundType, generate
from functional.runtime.rollout.pool import HttpPool
from functional.runtime.rollout.records import RecordWriter
from functional.runtime.rollout.requests import Attempt, RequestJournal, read_attempts
from functional.runtime.rollout.spread import Served, SpreadClient
from functional.runtime.telemetry import Telemetry, open_sinks
from functional.suite import checks
from functional.suite.agents import ToolTask
from functional.suite.batch import RolloutBatch, rollout_records, score
from functional.suite.chat_service import chat_server, load_template
from functional.suite.checklist import Checklist
from functional.suite.checkpoint import Checkpoints, TrainingInfo
from functional.suite.cluster import cluster_address, joined_ray, shared_gpus
from functional.suite.data import measure_data
from functional.suite.flaky import flaky_proxy
from functional.suite.hardware import UsageSampler
from functional.suite.leftovers import mapped_memory
from functional.suite.models import find_model, find_tokenizer
from functional.suite.preflight import Prepared
from functional.suite.report import (
    CheckpointRecord,
    LostSample,
    NodePlace,
    Refit,
    Report,
    Topology,
    ValidationRecord,
    write_atomically,
)
from functional.suite.seeds import check_seeds
from functional.suite.step_figures import as_step, scalars
from functional.suite.tasks import Task, make_task
from functional.suite.validation import has_arrived, is_due, judge, validation_prompts
from functional.suite.watching import watched

SEED_TOKENS = 64
EVENT_DELAY_S = 0.5
PAIRS = 400
"""Tokens of a step whose two log-probs are kept for the report."""


@dataclass(frozen=True)
class Parts:
    """What a run works with once everything is up. `instances`: every worker it has had, the replaced ones too;
    `client` is one for rollouts, `spread` the one that batches go through, `new_client` makes one for another URL;
    `chat` is there where the recipe exposes it."""

    fleet: Fleet
    trainer: Any
    pool: HttpPool
    client: RolloutClient
    spread: SpreadClient
    new_client: Callable[[str], RolloutClient]
    prober: RolloutClient
    probe: Probe
    refit: FleetRefit
    new_refit: Callable[[], FleetRefit]
    sampling: Sampling
    task: Task
    records: RecordWriter
    journal: RequestJournal
    telemetry: Telemetry
    overlap_prompt: tuple[int, ...]
    instances: list[Worker]
    chat: ChatServer | None


class Session:
    """State of one run: what is up, what was seen. `checks` and `report` hold what it found, whatever its end."""

    is_asynchronous = False
    """Whether rollouts go on beside training, and wait where admission is shut."""

    @property
    def may_span(self) -> bool:
        """Whether samples may be under way during an update."""
        return False

    @classmethod
    def find_misfits(cls, recipe: Recipe) -> list[Problem]:
        """What a recipe may ask of other runs, and this one would not do: refused before anything starts."""
        return []

    def __init__(self, prepared: Prepared, report: Report, out: Path, run_dir: Path) -> None:
        """out: folder of the report, records and logs; run_dir: an empty folder for sockets and data of the run."""
        self.recipe = prepared.recipe
        self.tokenizer: Any = prepared.tokenizer
        self.report = report
        self.out = out
        self.run_dir = run_dir
        self.began = time.monotonic()
        self.checks = Checklist()
        self.ports: list[int] = []
        self.remains: list[str] = []
        self.memory: set[Path] = set()
        self._traces: dict[str, Traces] = {}
        self.checkpoints = Checkpoints(
            prepared.recipe.checkpointing, out / prepared.recipe.checkpointing.checkpoint_dir
        )
        self._earlier_engines = 0
        self._joined: Any = None
        self._named: dict[str, list[int]] = {}
        self._trainer_pids: dict[str, list[int]] = {}
        self._stack = ExitStack()
        self._events = self._stack.enter_context(JsonLines(out / "events.jsonl"))
        self._agreement = self._stack.enter_context(JsonLines(out / "agreement.jsonl"))

    def say(self, what: str) -> None:
        """One line of progress with the seconds since the start. Where it cannot be written, the run goes on."""
        with suppress(OSError):
            print(f"[{time.monotonic() - self.began:6.1f} s] {what}", flush=True)

    def event(self, name: str, **details: str) -> None:
        """Append to events.jsonl: what the run is doing now, for whoever watches it from outside."""
        self._events.append({"time": time.time(), "event": name, **details})

    def close(self) -> None:
        """End everything that was started, last first; a failing step does not keep the others from running."""
        try:
            self._stack.close()
        except Exception:
            with suppress(OSError):
                (self.out / "logs" / "teardown.log").write_text(traceback.format_exc(), encoding="utf-8")
            self.checks.add("teardown.orderly", False, "shutdown raised, see logs/teardown.log")

    def run(self, programs: Programs) -> None:
        """Everything between start and teardown. Raises RunError when the run cannot go on, ConfigError when its model
        or engine options are the cause."""
        recipe, generation = self.recipe, self.recipe.policy.generation
        self._name_processes({})
        resumed = self._resumed()
        self._stack.enter_context(UsageSampler(self.out / "usage.jsonl", lambda: self._named))
        self.event("run: starting", run_dir=str(self.run_dir))
        model_dir = self._phase("model", lambda: find_model(recipe.policy.model_name, self.run_dir, self.say))
        if problem := find_model_problem(model_dir / "config.json"):
            raise ConfigError(f"policy.model_name={recipe.policy.model_name!r}: {problem}")
        for misfit in layout_problems(recipe, read_config(model_dir / "config.json")):
            raise ConfigError(str(misfit))
        if self.tokenizer is None:  # a hub model's files are here only now
            self.tokenizer = find_tokenizer(str(model_dir))
            self.report.data = measure_data(recipe, self.tokenizer)
        parser = self._stack.enter_context(EngineCheck.of(recipe, programs.dynamo_python, model_dir))
        self._phase("ray", lambda: self._stack.enter_context(joined_ray(self.run_dir, recipe)))
        signal.signal(signal.SIGTERM, interrupt)  # after Ray has set its own

        from functional.runtime.fleet.placement import place
        from functional.suite.joined import JoinedRun
        from functional.suite.trainer import RemoteWeights, TrainerRanks

        placement = self._phase("placement", lambda: place(recipe))
        self._stack.callback(self._look_for_remains)
        self._stack.callback(placement.close)
        gpus = shared_gpus(recipe)
        ranks = TrainerRanks(recipe, model_dir, resumed, placement.trainer, gpus)
        self._stack.callback(ranks.close)
        namespace = new_namespace()
        if cluster_address() is not None:
            self._joined = JoinedRun(placement, [ranks.first, *ranks.others], namespace)
        settings = FleetSettings(
            namespace=namespace,
            recipe=recipe,
            model_dir=model_dir,
            run_dir=self.run_dir,
            log_dir=(self.out / "logs").resolve(),
            programs=programs,
            address=placement.address,
            earlier_engines=self._earlier_engines,
            gpus=gpus,
        )
        patience = generation.dynamo_cfg.startup_timeout_s
        self._phase("engine's parser", lambda: parser.result(patience, recipe.scrub))
        fleet = Fleet(settings, placement.nodes, self.say)
        fleet.watch(ranks.check)
        self._stack.callback(lambda: self._traces.update(fleet.traces))
        self._stack.callback(fleet.shutdown)
        self._stack.callback(self._note_memory)
        self._stack.callback(lambda: self.ports.extend(fleet.listening_ports()))
        self.event("fleet: starting")
        self._phase("fleet", fleet.start)
        self.report.fleet_phases = fleet.phases
        self.report.topology = Topology(
            workers={worker.index: worker.instance_id for worker in fleet.workers},
            seeds={},
            device=recipe.cluster.device,
            trainer_ranks=recipe.trainer_ranks,
            share_gpu=recipe.cluster.share_gpu,
            note=f"TEST TOPOLOGY: trainer and workers share {gpus} GPU(s)" if recipe.cluster.share_gpu else "",
            nodes=[NodePlace.model_validate(node) for node in placement.nodes],
        )
        self.report.topology.seeds = fleet.seeds  # grows with every worker that is replaced
        self.report.parameters = self._phase("trainer", lambda: watched(fleet, ranks.first.ready.remote()))
        self._trainer_pids = ranks.pids()
        self._name_processes(fleet.pids())
        weights = RemoteWeights(ranks.first, generation.dynamo_cfg.control_timeout_s, ranks.check)
        self._train(self._prepare(fleet, ranks.first, weights, model_dir, placement))

    @property
    def worker_folders(self) -> list[Path]:
        """Of all workers that there were, once the fleet is down; they are gone by then, or are left."""
        return [folder for traces in self._traces.values() for folder in traces.folders]

    def _note_memory(self) -> None:
        """Shared memory that the run's processes use now: most of it has names that nobody else would know."""
        self.memory |= mapped_memory(descendants(os.getpid()))

    def _look_for_remains(self) -> None:
        """On a cluster that outlives the run; where it does not, the driver looks once Ray is gone."""
        if self._joined is not None:
            self.remains = self._joined.find_remains(self._traces)

    def _name_processes(self, fleet: dict[str, list[int]]) -> None:
        """Write processes.json: process ids by name, for whoever watches the run from outside."""
        self._named = {"driver": [os.getpid()], **self._trainer_pids, **fleet}
        write_atomically(self.out / "processes.json", json.dumps(self._named, indent=2) + "\n")

    def _phase(self, name: str, action: Any) -> Any:
        began = time.monotonic()
        result = action()
        seconds = self.report.phases[name] = time.monotonic() - began
        self.say(f"{name} ready in {seconds:.1f} s")
        return result

    def _prepare(self, fleet: Fleet, trainer: Any, weights: Any, model_dir: Path, placement: Any) -> Parts:
        recipe, generation, tokenizer = self.recipe, self.recipe.policy.generation, self.tokenizer
        task = self._make_task(model_dir)
        model_config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        gate = AdmissionGate(waits=self.is_asynchronous)
        gate.shut()  # the chat server is up before the first weights are proved
        journal = RequestJournal(self.out / "requests.jsonl")
        self._stack.callback(journal.close)
        url = fleet.frontend.url
        if recipe.faults.break_connections:
            proxy = self._stack.enter_context(flaky_proxy(url, recipe.faults.break_connections, recipe.grpo.seed))
            self._stack.callback(lambda: self.event("connections broken", **proxy.counted()))
            url = proxy.url
        limits = Limits(
            vocab_size=model_config["vocab_size"],
            max_model_len=generation.vllm_cfg.max_model_len,
            token_bytes=max(len(text.encode()) for text in tokenizer.get_vocab()),
        )
        dynamo = generation.dynamo_cfg
        pool = self._stack.enter_context(HttpPool())
        served = Served(url, recipe.policy.model_name, limits, dynamo.request_timeout_s, dynamo.max_inflight_requests)
        spread = SpreadClient(pool, gate, served, self.out, journal)
        self._stack.callback(spread.close)
        probed = replace(served, url=fleet.frontend.url, timeout_s=dynamo.control_timeout_s, max_inflight=None)
        prober = probed.client(pool, gate, journal)
        sampling = Sampling(
            generation.max_new_tokens,
            generation.temperature,
            generation.top_p,
            generation.top_k or NO_TOP_K,
            stop_token_ids=tuple(generation.stop_token_ids or ()),
            stop_strings=merge_stop_strings(generation.stop_strings),
        )
        vocabulary = min(len(tokenizer), model_config["vocab_size"])
        probe_length = min(
            max(2 * generation.vllm_kwargs.block_size, TOKENS) + 1, generation.vllm_cfg.max_model_len - 1
        )
        probe_sampling = Sampling(1, ignore_eos=True, prompt_logprobs=True)
        instances = list(fleet.workers)

        watched(fleet, trainer.foresee.remote(probe_prompt(0, vocabulary, probe_length)))

        def probe(worker: Worker, round_number: int) -> Completion:
            prompt = probe_prompt(round_number, vocabulary, probe_length)
            return pool.run(prober.complete_on(worker.instance_id, [prompt], probe_sampling))[0]

        def replace_lost(lost: Mapping[int, str]) -> list[Worker]:
            self._note_memory()
            workers = fleet.replace(lost)
            known = {worker.instance_id for worker in instances}
            instances.extend(worker for worker in workers if worker.instance_id not in known)
            self._name_processes(fleet.pids())
            return workers

        def new_refit() -> FleetRefit:
            return FleetRefit(
                fleet.workers,
                weights,
                gate,
                probe,
                address=placement.trainer_node.address,
                timeout_s=generation.dynamo_cfg.control_timeout_s,
                attempts=generation.dynamo_cfg.update_attempts,
                replace=replace_lost,
                ranks_per_worker=recipe.devices_per_engine,
                has_prefix_cache=recipe.has_prefix_cache,
                on_step=self._note_refit_step,
                on_transition=self._note_transition,
                drain_s=self._drain_s(),
                give_up_rollouts=self._give_up_rollouts(gate, chat),
            )

        chat = None
        if generation.vllm_cfg.expose_http_server:
            chat = self._stack.enter_context(chat_server(pool, gate, served, recipe, model_dir, journal))
            write_atomically(self.out / "chat.json", json.dumps({"url": chat.url, "model": served.model}) + "\n")
            self.say(f"chat at {chat.url}")
        records = self._stack.enter_context(RecordWriter(self.out / "rollouts.jsonl"))
        sinks = open_sinks(recipe.logger, self.out)
        telemetry = Telemetry(fleet, generation, sinks, lambda: len(self.report.steps))
        self._stack.enter_context(telemetry)
        return Parts(
            fleet=fleet,
            trainer=trainer,
            pool=pool,
            client=served.client(pool, gate, journal),
            spread=spread,
            new_client=lambda url: replace(served, url=url).client(pool, gate, journal),
            prober=prober,
            probe=probe,
            refit=new_refit(),
            new_refit=new_refit,
            sampling=sampling,
            task=task,
            records=records,
            journal=journal,
            telemetry=telemetry,
            overlap_prompt=probe_prompt(0, vocabulary, probe_length),
            instances=instances,
            chat=chat,
        )

    def _drain_s(self) -> float | None:
        """How long an update waits for the rollouts under way; as for anything else, unless given."""
        return None

    def _give_up_rollouts(self, gate: AdmissionGate, chat: ChatServer | None) -> Callable[[], None] | None:
        """For updates that do not wait for the rollouts under way: what ends them all, and the turns of chats."""
        return None

    def _make_task(self, model_dir: Path) -> Task:
        recipe = self.recipe
        if recipe.data.dataset_name == TOOL_DATA:
            return ToolTask(load_template(recipe, model_dir), recipe.grpo.num_prompts_per_step, recipe.grpo.seed)
        data, grpo = recipe.data, recipe.grpo
        held = data.split_validation_size
        return make_task(data.dataset_name, self.tokenizer, grpo.num_prompts_per_step, grpo.seed, data.keys, held)

    def _train(self, parts: Parts) -> None:
        grpo, fleet = self.recipe.grpo, parts.fleet
        done = self.report.resumed_from or 0
        self._refit(parts, done)
        self._check_seeds(parts)
        sockets = self._sockets(fleet)
        self.report.sockets = checks.check_sockets(self.checks, sockets, self._told_ports())
        if not done and is_due(grpo, 0):
            self._validate(parts, 0)
        self._take_steps(parts, done + 1)
        asked = self._last_completions(parts, grpo.max_num_steps + 1)
        checks.check_post_update(self.checks, asked, str(parts.refit.version))
        if parts.chat is not None:
            parts.chat.close()  # what follows looks at caches, and for every request's end
        if self.recipe.has_prefix_cache:
            self._check_overlap(parts)
        checks.check_routing(self.checks, fleet, parts.records.instance_ids)
        fleet.check_membership()
        parts.telemetry.poll()
        checks.check_telemetry(self.checks, parts.telemetry, len(parts.instances) - len(fleet.workers))
        fleet.flush_logs()
        self._check_join(parts)
        self._keep_metrics(fleet)

    def _take_steps(self, parts: Parts, first: int) -> None:
        """Every step from `first` on, with the update, the validation and the checkpoint that follow it."""
        grpo, steps = self.recipe.grpo, self.recipe.grpo.max_num_steps
        for step in range(first, steps + 1):
            self._step(parts, step)
            result = self._bring(parts, step)
            found = self._validate(parts, step) if is_due(grpo, step) else {}
            last = step if has_arrived(grpo, found) else steps
            if result.reached and self.checkpoints.is_due(step, last):
                self._save(parts, step, found)
            if step == last < steps:
                self.say(f"step {step}: {grpo.stop_at_validation_metric} has reached its threshold")
                break

    def _bring(self, parts: Parts, step: int) -> RefitResult:
        """Bring the step's weights to the fleet, which must not be able to prove them before."""
        checks.check_stale_refused(self.checks, step, parts.refit)
        return self._refit(parts, step)

    def _sockets(self, fleet: Fleet) -> list[NodeSockets]:
        """What the run listens on, on each of its nodes."""
        found: list[NodeSockets] = [NodeSockets.here()] if self._joined is None else self._joined.sockets(fleet)
        return found

    def _told_ports(self) -> set[int]:
        """Ports that the recipe names."""
        return {self.recipe.policy.generation.dynamo_cfg.chat_port} - {0}

    def _last_completions(self, parts: Parts, step: int) -> list[Completion]:
        return self._generate(parts, parts.spread, [prompt.token_ids for prompt in parts.task.prompts(step)], step)

    def _step(self, parts: Parts, step: int) -> None:
        """Rollouts, with the snapshot made beside them, and one optimizer step."""
        kept = parts.trainer.keep.remote()
        batch = self._rollouts(parts, step)
        watched(parts.fleet, kept)
        self._note_step(parts, step, batch, watched(parts.fleet, parts.trainer.train.remote(batch.samples(), step)))

    def _note_step(self, parts: Parts, step: int, batch: RolloutBatch, metrics: dict[str, float]) -> None:
        self.report.steps.append(as_step(step, batch, metrics))
        self._agreement.append({"step": step, **watched(parts.fleet, parts.trainer.agreement.remote(PAIRS))})
        parts.telemetry.write(scalars(batch, metrics), step)
        checks.check_step(self.checks, step, batch, metrics, self.recipe.checks, self.may_span)
        self.say(f"step {step}: reward {batch.mean_reward:.3f}, " + checks.describe_step(metrics))

    def _resumed(self) -> Path | None:
        """The checkpoint to go on from, if there is one. Raises ConfigError for one of another recipe."""
        config, grpo = self.recipe.checkpointing, self.recipe.grpo
        newest = self.checkpoints.newest() if config.enabled else None
        if newest is None:
            return None
        info = TrainingInfo.of(newest)
        ours = {
            "policy.model_name": (self.recipe.policy.model_name, info.model_name),
            "policy.optimizer.name": (self.recipe.policy.optimizer.name, info.optimizer),
            "grpo.seed": (grpo.seed, info.seed),
        }
        for key, (given, kept) in ours.items():
            if given != kept:
                raise ConfigError(f"{key}={given!r}: the checkpoint {newest} was made with {kept!r}")
        if info.step >= grpo.max_num_steps:
            message = f"the checkpoint {newest} has done them all: set more, or another checkpointing.checkpoint_dir"
            raise ConfigError(f"grpo.max_num_steps={grpo.max_num_steps}: {message}")
        self.report.resumed_from = info.step
        self._earlier_engines = info.engines_started
        self.say(f"going on from {newest}, {info.step} of {grpo.max_num_steps} steps done")
        return newest

    def _save(self, parts: Parts, step: int, validated: Mapping[str, float]) -> None:
        began, folder = time.monotonic(), self.checkpoints.path(step).resolve()
        taken = self.report.steps[-1].model_dump(exclude={"step"})
        taken |= {"reward": taken.pop("mean_reward")}
        metrics = {f"train:{name}": value for name, value in taken.items() if math.isfinite(value)}
        info = TrainingInfo(
            step=step,
            seed=self.recipe.grpo.seed,
            model_name=self.recipe.policy.model_name,
            optimizer=self.recipe.policy.optimizer.name,
            engines_started=self._earlier_engines + max(map(len, parts.fleet.seeds.values())),
            metrics=metrics | {f"val:{name}": value for name, value in validated.items()},
        )
        self.event(f"step {step}: saving")
        size = watched(parts.fleet, parts.trainer.save.remote(folder, info))
        self.checkpoints.prune()
        seconds = time.monotonic() - began
        record = CheckpointRecord(step=step, path=str(folder), bytes=size, seconds=seconds)
        self.report.checkpoints = [*(self.report.checkpoints or []), record]
        self.say(f"step {step}: {folder} written, {size / 1e6:.1f} MB in {seconds:.2f} s")

    def _validate(self, parts: Parts, step: int) -> dict[str, float]:
        """The figures by NeMo RL's names."""
        grpo, generation = self.recipe.grpo, self.recipe.policy.generation
        prompts = validation_prompts(self.recipe.data, grpo, self.tokenizer)
        count = grpo.val_num_generations_per_prompt
        temperature = generation.val_temperature
        sampling = replace(
            parts.sampling,
            temperature=generation.temperature if temperature is None else temperature,
            top_p=generation.val_top_p or generation.top_p,
            top_k=generation.val_top_k or generation.top_k or NO_TOP_K,
        )
        flat = [prompt.token_ids for prompt in prompts for _ in range(count)]
        completions = self._generate(parts, parts.spread, flat, step, sampling)
        checks.check_validation(self.checks, step, completions)
        found = judge(step, prompts, completions, parts.task)
        self.report.validations = [*(self.report.validations or []), ValidationRecord(**asdict(found))]
        metrics = found.metrics()
        parts.telemetry.write({f"validation/{name}": value for name, value in metrics.items()}, step)
        self.say(f"step {step}: validation on {len(prompts)} prompts: accuracy {found.accuracy:.3f}")
        return metrics

    def _note_refit_step(self, version: int, name: str) -> None:
        self._stop_if_unwanted()
        self.event(f"refit {version}: {name}")

    def _note_transition(self, transition: Transition) -> None:
        self.report.refit_transitions.append(transition)
        self.event(f"refit {transition.version} {transition.before} → {transition.after}: {transition.reason}")
        if transition.event is not Event.DONE or transition.before is State.RECOVERING:
            self.say(f"refit: {transition.before} → {transition.after}: {transition.reason}")

    def _check_overlap(self, parts: Parts) -> None:
        """A shared prefix overlaps the second time the router sees it, and no more once the caches are cleared.

        Asked of the frontend itself: where a connection breaks behind the answer, the next attempt would find the
        prefix that the one before it left in the cache.
        """
        prompt, named = parts.overlap_prompt, self._addressees(parts.fleet)[:1]
        sampling = Sampling(1, parts.sampling.temperature, ignore_eos=True, instances=named)

        def routed() -> Completion:
            time.sleep(EVENT_DELAY_S)  # cache events reach the router behind the answers
            return parts.pool.run(parts.prober.complete_all([prompt], sampling))[0]

        routed()
        warm = routed()
        cleared = checks.cleared_events(parts.fleet)
        for worker in parts.fleet.workers:
            worker.control.call("flush_cache")
            # An engine tells of a clear with its next step.
            parts.pool.run(parts.prober.complete_on(worker.instance_id, [prompt[:4]], sampling))
        checks.await_cleared(parts.fleet, cleared)
        checks.check_overlap(self.checks, warm, routed())

    def _check_join(self, parts: Parts) -> list[Attempt]:
        """Returns every attempt of the run."""
        parts.journal.written().result()
        attempts = [one for file in sorted(self.out.glob("requests*.jsonl")) for one in read_attempts(file)]
        self.report.requests = checks.check_join(self.checks, attempts, parts.fleet, self.out / "logs")
        return attempts

    def _check_seeds(self, parts: Parts) -> None:
        """One prompt to every worker, at temperature 1 whatever the recipe's, as long as an answer may be.

        Before any rollout: until then all engines have drawn as many random numbers, and with one seed the same.
        """
        prompt = parts.task.prompts(1)[0].token_ids
        room = self.recipe.policy.generation.vllm_cfg.max_model_len - len(prompt)
        sampling = Sampling(min(room, SEED_TOKENS), ignore_eos=True)
        check_seeds(
            self.checks,
            parts.fleet.workers,
            lambda worker: parts.pool.run(parts.prober.complete_on(worker.instance_id, [prompt], sampling))[0],
        )

    def _keep_metrics(self, fleet: Fleet) -> None:
        logs = self.out / "logs"
        (logs / "frontend.prom").write_text(fleet.frontend.metrics(), encoding="utf-8")
        for worker in fleet.workers:
            (logs / f"worker-{worker.index}.prom").write_text(worker.control.metrics(), encoding="utf-8")

    def _refit(self, parts: Parts, version: int, name: str = "") -> RefitResult:
        """Bring the fleet to `version`, and judge it. Where the fleet goes back to a version, so does the trainer."""
        fleet = parts.fleet
        if not fleet.lost_workers():
            fleet.check_membership()
        cleared, passes = checks.cleared_events(fleet), self._passes(parts)
        try:
            result = parts.refit.update(version)
        except RunError:
            fleet.check_control_plane()  # a dead process is the first cause
            raise
        self.report.refits.append(Refit.model_validate(result))
        checks.check_refit(self.checks, name or f"refit{version}", result, fleet, cleared)
        if self.recipe.trainer_ranks > 1:
            checks.check_gathered(self.checks, name or f"refit{version}", result, self._passes(parts) - passes)
        if not result.reached:
            watched(fleet, parts.trainer.go_back.remote(result.version))
        phases = ", ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in result.phases.items())
        self.say(f"policy version {result.version} on every worker in {result.total_s:.2f} s (ms: {phases})")
        return result

    def _passes(self, parts: Parts) -> int:
        """How often the trainer's ranks have gathered the weights."""
        if self.recipe.trainer_ranks == 1:
            return 0
        passes: int = watched(parts.fleet, parts.trainer.passes.remote())
        return passes

    def _generate(
        self,
        parts: Parts,
        client: Completer[AskedType, FoundType],
        prompts: Sequence[AskedType],
        step: int,
        sampling: Sampling | None = None,
    ) -> list[FoundType]:
        """What comes of each prompt. What is lost with a worker is generated again by a fleet made whole."""

        def note_lost(index: int, error: RolloutError) -> None:
            self.report.lost_samples.append(LostSample(step=step, rollout=index, reason=str(error)))

        return generate(
            client,
            parts.fleet,
            prompts,
            sampling or parts.sampling,
            find_lost=lambda: self._find_lost(parts),
            make_whole=None if parts.refit.version is None else lambda: self._make_whole(parts, step),
            on_lost=note_lost,
            addressed=lambda asked: replace(asked, instances=self._addressees(parts.fleet)),
            state=lambda: self._fleet_state(parts),
            is_given_up=self._is_given_up,
        )

    def _fleet_state(self, parts: Parts) -> Hashable:
        """Another, once requests that were sent before may be lost although no worker is lost now."""
        return None

    def _find_lost(self, parts: Parts) -> Mapping[int, str]:
        """Slot → why, of the workers that are lost."""
        return parts.refit.find_lost()

    def _make_whole(self, parts: Parts, step: int) -> None:
        assert parts.refit.version is not None
        if parts.chat is not None:
            parts.chat.give_up("a worker was lost")  # no agent waits for it any more, but it holds the gate
        self._refit(parts, parts.refit.version, f"step{step}.replacement")

    def _is_given_up(self, state: Hashable) -> bool:
        """Asked while rollouts are under way: whether those that were sent when the fleet's state was this are to be
        lost. What it raises ends them."""
        return False

    def _stop_if_unwanted(self) -> None:
        """Raises InterruptedRunError in a thread beside the main one whose work is not wanted any more."""

    def _addressees(self, fleet: Fleet) -> tuple[int, ...]:
        """The workers that rollouts must name: all where the frontend routes none, else none."""
        if self.recipe.policy.generation.dynamo_cfg.frontend_args.router_mode != "direct":
            return ()
        return tuple(worker.instance_id for worker in fleet.workers)

    def _rollouts(self, parts: Parts, step: int) -> RolloutBatch:
        return self._note_rollouts(parts, step, self._complete(parts, step))

    def _complete(self, parts: Parts, step: int) -> list[Completion]:
        """The step's samples, a prompt's side by side."""
        prompts = parts.task.prompts(step)
        generations = self.recipe.grpo.num_generations_per_prompt
        flat = [prompt.token_ids for prompt in prompts for _ in range(generations)]
        self.say(f"step {step}: {len(prompts)} prompts × {generations} generations")
        self.event(f"step {step}: generating")
        return self._generate(parts, parts.spread, flat, step)

    def _note_rollouts(self, parts: Parts, step: int, completions: list[Completion]) -> RolloutBatch:
        """Score, record and check them."""
        generations = self.recipe.grpo.num_generations_per_prompt
        batch = score(parts.task.prompts(step), completions, parts.task, self.recipe.grpo)
        parts.records.write(rollout_records(batch, self.run_dir.name, step, generations))
        checks.check_rollouts(self.checks, f"step{step}", batch, parts.instances, self.recipe.checks)
        return batch


def interrupt(signum: int, _frame: Any) -> None:
    """SIGTERM ends a run as an error would."""
    raise InterruptedRunError(f"stopped by {signal.Signals(signum).name}")

"""A fleet of simulated workers that hold weights, caches and version labels, and can fail at every call.

`explore` drives a scenario down every sequence of outcomes with at most so many faults.
"""

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

import torch

from functional.engine.errors import NOT_PROVED
from functional.engine.plan_wire import Verdict
from functional.engine.proof import EngineProof, TensorProof
from functional.engine.wire import Manifest, Slot
from functional.runtime.errors import RefitError, RolloutError, RunError
from functional.runtime.fleet.control import ControlError, WorkerLostError, rpc_body
from functional.runtime.fleet.worker import Worker
from functional.runtime.refit.machine import State
from functional.runtime.refit.parts import SourceLostError
from functional.runtime.refit.probe import TOKENS, ProbeScore
from functional.runtime.refit.transaction import FleetRefit
from functional.runtime.rollout.completion import Completion
from functional.runtime.rollout.gate import AdmissionGate

VERSION = "get_weight_version"
UPDATE = "update_weights_from_distributed"
MANIFEST = Manifest((Slot("w", torch.bfloat16, (1,)),), packed=True)


LIES = [(("pause_generation", "flush_cache"), "silent"), (("update_weights", "update_by_plan"), "corrupt")]
"""Calls that may say that they did what they did not."""


class Unsound(BaseException):
    """A request could be admitted by a fleet that is not uniform."""


class Chooser:
    """Picks outcomes: those of `script` first, then always the first, which is success."""

    def __init__(self, script: list[int], max_faults: int) -> None:
        self.script = script
        self.taken: list[tuple[int, int]] = []  # (picked, of how many)
        self.max_faults = max_faults
        self.active = True

    def pick(self, options: list[str]) -> str:
        if not self.active:
            return options[0]
        faults = sum(1 for picked, _ in self.taken if picked)
        count = len(options) if faults < self.max_faults else 1
        index = len(self.taken)
        picked = self.script[index] if index < len(self.script) else 0
        self.taken.append((picked, count))
        return options[picked]


def explore(scenario: Callable[[Chooser], None], max_faults: int) -> int:
    """Run `scenario` for every script of outcomes, depth first; returns how many there are."""
    script: list[int] = []
    for count in range(1, 1_000_000):
        chooser = Chooser(script, max_faults)
        scenario(chooser)
        taken = chooser.taken
        while taken and taken[-1][0] + 1 >= taken[-1][1]:
            taken.pop()
        if not taken:
            return count
        script = [picked for picked, _ in taken[:-1]] + [taken[-1][0] + 1]
    raise AssertionError("too many scripts")


@dataclass
class Engine:
    """One worker's state. weights: a version, or None for anything else; cache: versions its blocks were made with."""

    weights: int | None = None
    label: str = "initial"
    cache: set[int | None] = field(default_factory=set)
    paused: bool = False
    frozen: bool = False
    loading: bool = False
    incoming: int | None = None
    group: int = 0
    planned: int = 0
    end: str = ""
    sticky: set[str] = field(default_factory=set)


class World:
    """The fleet, the sender and the gate; asserts at each call that admission is open in a uniform fleet only."""

    def __init__(
        self,
        chooser: Chooser,
        attempts: int = 1,
        workers: int = 2,
        replaceable: bool = True,
        plan: bool = False,
        in_flight: bool = False,
    ) -> None:
        """plan: whether engines and sender agree on one, or use the checkpoint protocol; in_flight: whether updates do
        not wait for rollouts."""
        self.chooser = chooser
        self.plan = plan
        self.claimed: int | None = None
        self.gate = AdmissionGate()
        self.instances = 0
        self.given_up: list[int] = []  # instances that there had been
        self.group = 0
        self.sent: int | None = None
        self.source_lost = False
        self.workers = [self.new_worker(index) for index in range(workers)]
        self.refit = FleetRefit(
            self.workers,
            self,
            self.gate,
            self.probe,
            address="127.0.0.1",
            timeout_s=0.01,
            attempts=attempts,
            replace=self.replace if replaceable else None,
            on_transition=lambda transition: self.assert_sound(),
            give_up_rollouts=self.give_up_rollouts if in_flight else None,
            pool=Immediately(),
        )

    @property
    def engines(self) -> list[Engine]:
        return [worker.control.engine for worker in self.workers]

    def give_up_rollouts(self) -> None:
        self.given_up.append(self.instances)
        while self.gate.idle_since() is None:
            self.gate.leave()

    def new_worker(self, index: int) -> Worker:
        self.instances += 1
        return Worker(index, self.instances, FakeControl(self, index))

    def assert_sound(self) -> None:
        """Raises Unsound, which no handler of the refit takes for a failed attempt."""
        if self.gate.is_open != (self.refit.state is State.SERVING):
            raise Unsound(f"admission open: {self.gate.is_open}, while {self.refit.state}")
        version = self.refit.version
        sound = Engine(version, str(version))
        for engine in self.engines if self.gate.is_open else []:
            unheld = {"incoming": None, "group": 0, "planned": 0, "end": "", "sticky": set(), "frozen": False}
            seen = replace(engine, cache=engine.cache - {version}, **unheld)
            if seen != sound:
                raise Unsound(f"admission open at version {version}: {seen}")

    def serve(self) -> None:
        """A rollout on each worker."""
        self.assert_sound()
        assert self.gate.is_open
        for engine in self.engines:
            engine.cache.add(engine.weights)

    def probe(self, worker: Worker, round_number: int) -> Completion:
        engine: Engine = worker.control.engine
        if engine.end or engine.paused or engine.loading or self.chooser.pick(["ok", "fails"]) == "fails":
            raise RolloutError(f"probe of worker {worker.index} failed")
        cached = 16 if engine.cache else 0
        engine.cache.add(engine.weights)
        seen = (-100.0 if engine.weights is None else float(engine.weights),)
        prompt = tuple(range(TOKENS + 1))
        answer = Completion("r", prompt, (2,), seen, worker.instance_id, cached, None, 0.0, 0.0, None)
        return replace(answer, prompt_logprobs=seen * TOKENS)

    def replace(self, lost) -> list[Worker]:
        self.assert_sound()
        if self.chooser.pick(["ok", "fails"]) == "fails":
            raise RunError("no new worker came up")
        self.workers = [self.new_worker(w.index) if w.index in lost else w for w in self.workers]
        return list(self.workers)

    # the weight source

    def metadata(self, version: int) -> Manifest:
        self.alive()
        return MANIFEST

    def listen(self, address: str) -> int:
        self.alive()
        self.group += 1
        return 1

    def connect(self, address: str, port: int, world_size: int) -> None:
        self.alive()

    def proof(self, version: int) -> EngineProof:
        self.alive()
        if self.chooser.pick(["ok", "fails"]) == "fails":
            raise RefitError("the hashing failed")
        return EngineProof(None, ({"w": TensorProof("bfloat16", (1,), 2, str(version))},))

    def agree(self, version: int) -> dict[str, str]:
        self.alive()
        if self.chooser.pick(["ok", "fails"]) == "fails":
            raise RefitError("no agreement")
        return {} if self.plan else {"w": "its layer packs it"}

    def send_by_plan(self, version: int) -> Verdict:
        self.claimed = version
        self.send(version)
        return Verdict([], 1, [2], 0.0, 0.0)

    def prove_by_plan(self, version: int) -> Verdict:
        self.alive()
        self.claimed = version
        return Verdict([], 1, [2], 0.0, 0.0)

    def send(self, version: int) -> None:
        self.assert_sound()
        self.sent = None
        outcome = self.chooser.pick(["ok", "fails", "lost"])
        self.source_lost = outcome == "lost"
        self.alive()
        if outcome == "fails":
            raise RefitError("the send failed")
        self.sent = version

    def abort(self, reason: str) -> None:
        self.alive()

    def score(self, version: int, prompt) -> ProbeScore:
        self.alive()
        return ProbeScore([float(version)] * (len(prompt) - 1), [version + 5.0] * (len(prompt) - 1))

    def alive(self) -> None:
        if self.source_lost:
            raise SourceLostError("the sender is gone")


class FakeControl:
    """A worker's control server. Each call may be refused, fail after its effect, kill, hang, or do nothing."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.engine = Engine()

    def call(self, route: str, body=None, timeout_s: float | None = None):
        self.world.assert_sound()
        engine, body = self.engine, body or {}
        what = body.get("engine_rpc", route)
        if engine.end == "killed":
            raise ControlError(f"worker {self.index}: {what}: connection refused")
        if engine.end == "hangs":
            raise WorkerLostError(self.index, f"worker {self.index}: {what}: no answer within the deadline")
        if what in engine.sticky:
            raise ControlError(f"worker {self.index}: {what}: refused for good")
        lies = [lie for whats, lie in LIES if what in whats]
        effectless = route in ("liveness_probe", VERSION)
        options = ["ok", "killed"] if effectless else ["ok", "refused", "refused for good", "late", "killed", "hangs"]
        outcome = self.world.chooser.pick([*options, *lies])
        if outcome in ("killed", "hangs"):
            engine.end = outcome
            return self.call(route, body, timeout_s)
        if outcome == "refused for good":
            engine.sticky.add(what)
        if outcome.startswith("refused"):
            raise ControlError(f"worker {self.index}: {what}: refused")
        answer = self.act(what, body, outcome)
        if route == UPDATE:
            engine.label = body["weight_version"]
        if outcome == "late":
            raise ControlError(f"worker {self.index}: {what}: failed after its effect")
        return answer

    def engine_rpc(self, method: str, weight_version: str, timeout_s: float | None = None, **arguments) -> None:
        self.send_rpc(method, rpc_body(method, weight_version, **arguments), timeout_s)

    def send_rpc(self, method: str, body: bytes, timeout_s: float | None = None) -> None:
        sent = json.loads(body)
        if not self.engine.paused and not sent.pop("allow_unpaused", False) and not self.engine.end:
            raise ControlError(f"worker {self.index}: must be paused")
        self.call(UPDATE, sent, timeout_s)

    def act(self, what: str, body, outcome: str):
        engine, world = self.engine, self.world
        if what == "pause_generation":
            engine.paused, engine.frozen = True, body["mode"] == "keep"
        elif what == "resume_generation":
            engine.paused = False
        elif what == "init_weight_transfer_engine":
            engine.group = world.group
            engine.planned = 0
        elif what == "learn_plan":
            self.require(engine.group == world.group, "no group")
            engine.weights, engine.planned = None, engine.group
        elif what == "update_by_plan":
            self.require(engine.planned == world.group and world.sent is not None, "nothing was sent")
            engine.weights = None if outcome == "corrupt" else world.sent
            self.require(engine.weights == world.claimed, NOT_PROVED)
        elif what == "prove_by_plan":
            self.require(engine.planned == world.group, "no plan")
            self.require(engine.weights == world.claimed, NOT_PROVED)
        elif what == "reset_reload":
            engine.loading, engine.incoming = False, None
        elif what == "start_weight_update":
            self.require(not engine.loading, "a reload is under way")
            engine.loading, engine.weights = True, None
        elif what == "update_weights":
            self.require(engine.loading and engine.group == world.group and world.sent is not None, "nothing was sent")
            engine.incoming = None if outcome == "corrupt" else world.sent
        elif what == "finish_weight_update":
            self.require(engine.loading, "no reload is under way")
            engine.loading, engine.weights = False, engine.incoming
        elif what == "prove_weights":
            claimed = body["expected"]["ranks"][0]["w"]["digest"]
            self.require(str(engine.weights) == claimed, NOT_PROVED)
        if what in ("pause_generation", "flush_cache") and outcome != "silent":
            engine.cache.clear()
        return {"status": "ok", "version": engine.label}

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise ControlError(f"worker {self.index}: {problem}")


class Immediately(Executor):
    """Runs what is submitted there and then."""

    def submit(self, action, /, *arguments, **options):
        future: Future = Future()
        try:
            future.set_result(action(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future

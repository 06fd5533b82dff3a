"""Refit under faults: one fleet of two real workers, one case after the other, each with the end it must come to.

Sends that fail or are wrong, clears that do not clear, workers killed and stopped, and at last the trainer killed.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from functional.engine.errors import NOT_PROVED
from functional.runtime.errors import RefitError, RolloutError
from functional.runtime.fleet.control import ControlError, WorkerControl
from functional.runtime.refit.machine import Event, State, Transition
from functional.runtime.refit.parts import RefitResult
from functional.runtime.rollout.requests import received_requests
from functional.suite import driver
from functional.suite.faults import last_rank
from functional.suite.report import FaultCase
from functional.suite.send_faults import SendFault
from functional.suite.session import Parts, Session, interrupt
from functional.suite.watching import watched

SETTINGS = [
    "cluster.gpus_per_node=3",
    "policy.generation.colocated.resources.gpus_per_node=2",
    "policy.generation.dynamo_cfg.control_timeout_s=15",
    "policy.generation.vllm_cfg.max_model_len=1024",
]
WORKED_S = 5.0
"""How long a worker is at an answer whose request its log has just told of."""
PACE_TOKENS, MOST_TOKENS = 16, 512
"""Tokens of the answers that show the engines' pace, and the most that fit into SETTINGS' context."""


@dataclass(frozen=True)
class DelayedSignal:
    """Send `signum` to `pids`, `delay_s` after the run comes to `moment` (the name of an event)."""

    moment: str
    pids: list[int]
    signum: int
    delay_s: float


class UnclearedControl(WorkerControl):
    """A worker's control whose clears do not happen: `refused` once, or always answered with ok (`ignored`)."""

    def __init__(self, control: WorkerControl, timeout_s: float, clears: Literal["refused", "ignored"]) -> None:
        super().__init__(control.index, control.server, timeout_s)
        self.clears = clears
        self.refusals = 0

    def call(self, route: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> dict[str, Any]:
        if self.clears == "ignored" and route == "pause_generation":
            return super().call(route, {**(body or {}), "clear_cache": False}, timeout_s)
        if self.clears == "ignored" and route == "flush_cache":
            return {"status": "ok"}
        if route == "flush_cache" and self.refusals == 0:
            self.refusals += 1
            raise ControlError(f"worker {self.index}: flush_cache: injected refusal")
        return super().call(route, body, timeout_s)


class FaultSession(Session):
    """A run whose steps are fault cases. Those at the end of the list leave less of the fleet than they found."""

    only: tuple[str, ...] = ()

    def _train(self, parts: Parts) -> None:
        self._pending: DelayedSignal | None = None
        self._version = 0
        self.report.fault_cases = ended = []
        self._refit(parts, 0)
        cases: dict[str, Callable[[Parts], Parts | None]] = {
            "failing-n-times": self._failing_n_times,
            "failing-sends": self._failing_sends,
            "lying-sends": self._lying_sends,
            "old-weights-proved": self._old_weights_proved,
            "clear-refused": self._clear_refused,
            "clear-ignored": self._clear_ignored,
            "worker-killed-generating": self._worker_killed_generating,
            "worker-killed-mid-transfer": self._worker_killed_mid_transfer,
            "worker-stopped-mid-transfer": self._worker_stopped_mid_transfer,
            "rank-killed-generating": self._rank_killed_generating,
            "rank-killed-mid-transfer": self._rank_killed_mid_transfer,
            "all-workers-killed": self._all_workers_killed,
            "trainer-killed-mid-transfer": self._trainer_killed,
        }
        for name, case in cases.items():
            if self.only and name not in self.only:
                continue
            if name.startswith("rank-") and self.recipe.devices_per_engine == 1:
                continue
            self.say(f"— {name}")
            began = time.monotonic()
            parts = case(parts) or parts
            ended.append(FaultCase(case=name, seconds=time.monotonic() - began))

    def event(self, name: str, **details: str) -> None:
        super().event(name, **details)
        pending = getattr(self, "_pending", None)
        if pending is not None and name == pending.moment:
            self._pending = None
            threading.Thread(target=send_later, args=(pending,), daemon=True).start()

    def _failing_n_times(self, parts: Parts) -> None:
        """v+1 fails as often as it is tried: back at v, proved; the next step succeeds."""
        attempts = self.recipe.policy.generation.dynamo_cfg.update_attempts
        before = parts.refit.version
        version = self._nudge(parts, SendFault("fail", 3, times=attempts))
        result = parts.refit.update(version)
        self._judge(
            "failing-n-times.back",
            result.version == before and result.attempts == attempts + 1 and result.proved > 0 and is_open(parts),
            result,
        )
        watched(parts.fleet, parts.trainer.go_back.remote(before))
        self._version += 1
        self._step(parts, self._version)
        self._judge("failing-n-times.next", (after := self._refit(parts, self._version)).attempts == 1, after)

    def _failing_sends(self, parts: Parts) -> None:
        """A send that fails after some tensors leaves a reload half begun; the next attempt proves every byte."""
        last = len(self._names(parts)) - 1
        for after in (0, 1, last // 2, last):
            version = self._nudge(parts, SendFault("fail", after))
            result = self._refit(parts, version)
            self._judge(f"failing-send-{after}", failed_in(result) == [State.SENDING], result)

    def _lying_sends(self, parts: Parts) -> None:
        """Tensors swapped, a bit flipped, a tensor skipped, one sent twice: the proof refuses each."""
        names = self._names(parts)
        norm = next(index for index, name in enumerate(names) if name.endswith("input_layernorm.weight"))
        faults = [SendFault("swap"), SendFault("flip", 2), SendFault("skip", norm), SendFault("twice", norm)]
        for fault in faults:
            version = self._nudge(parts, fault)
            result = self._refit(parts, version)
            refused = [t.reason for t in result.transitions if t.event is Event.FAILED]
            if fault.kind == "twice" and result.by_plan:  # there is no place for it
                proper = failed_in(result) == [State.SENDING] and "but the schedule has" in refused[0]
            else:
                proper = failed_in(result) == [State.PROVING] and NOT_PROVED in refused[0]
            self._judge(f"lying-send-{fault.kind}", proper, result)

    def _old_weights_proved(self, parts: Parts) -> None:
        """An engine that computes with old weights under a satisfied proof: the probe refuses it."""
        result = self._refit(parts, self._nudge(parts, SendFault("old")))
        self._judge("old-weights-proved", failed_in(result) == [State.PROBING], result)

    def _clear_refused(self, parts: Parts) -> None:
        """A clear that fails keeps admission shut until one has been seen."""
        self._uncleared(parts, "refused")
        result = self._refit(parts, self._nudge(parts))
        self._judge("clear-refused", failed_in(result) == [State.CLEARING], result)
        parts.refit.workers[1] = parts.fleet.workers[1]

    def _clear_ignored(self, parts: Parts) -> Parts:
        """A clear that is reported but did not happen is detected: the update stops, admission stays shut."""
        self._uncleared(parts, "ignored")
        reason = self._stops(parts, self._nudge(parts))
        self._judge_stop("clear-ignored", parts, "the cache was not cleared" in reason, reason)
        parts = replace(parts, refit=parts.new_refit())  # the fleet itself is sound
        result = self._refit(parts, self._nudge(parts))
        self._judge("clear-ignored.fleet_sound", result.attempts == 1 and is_open(parts), result)
        return parts

    def _worker_killed_generating(self, parts: Parts) -> None:
        """What was lost with the worker is generated again at the same version; the worker is replaced."""
        self._lost_generating(parts, "worker-killed-generating", parts.fleet.pids()["worker-0"])

    def _rank_killed_generating(self, parts: Parts) -> None:
        """The same where one rank of the engine dies: all of the engine is replaced."""
        self._lost_generating(parts, "rank-killed-generating", last_rank(parts.fleet.pids()["worker-0"]))

    def _lost_generating(self, parts: Parts, name: str, pids: list[int]) -> None:
        version, before = parts.refit.version, len(parts.instances)
        completions = self._generate_while_killing(parts, {0: pids})
        again = sum(1 for completion in completions if completion.attempt > 1)
        same_version = parts.refit.version == version
        self._refit(parts, self._nudge(parts))
        replaced = len(parts.instances) - before
        self.checks.add(
            f"fault.{name}",
            again > 0 and same_version and replaced == 1 and not any(c.problem for c in completions),
            f"{len(completions)} completions, {again} of them generated again, {replaced} worker replaced",
        )

    def _worker_killed_mid_transfer(self, parts: Parts) -> None:
        """Replaced in its slot, group formed anew, the same version reached."""
        self._hit_transfer(parts, "worker-killed-mid-transfer", "worker-0", signal.SIGKILL)

    def _rank_killed_mid_transfer(self, parts: Parts) -> None:
        """The engine is replaced, and the same version reached."""
        rank = last_rank(parts.fleet.pids()["worker-0"])
        self._hit_transfer(parts, "rank-killed-mid-transfer", "worker-0", signal.SIGKILL, rank)

    def _worker_stopped_mid_transfer(self, parts: Parts) -> None:
        """A worker whose transfer hangs past the deadline counts as dead."""
        self._hit_transfer(parts, "worker-stopped-mid-transfer", "worker-1", signal.SIGSTOP)

    def _all_workers_killed(self, parts: Parts) -> None:
        """No worker left: all are replaced, their samples generated again, at the same version."""
        version, before = parts.refit.version, len(parts.instances)
        named = parts.fleet.pids()
        completions = self._generate_while_killing(parts, {index: named[f"worker-{index}"] for index in (0, 1)})
        again = sum(1 for completion in completions if completion.attempt > 1)
        replaced = len(parts.instances) - before
        self.checks.add(
            "fault.all-workers-killed",
            again > 0 and replaced == 2 and parts.refit.version == version and is_open(parts),
            f"{len(completions)} completions, {again} of them generated again, {replaced} workers replaced",
        )

    def _trainer_killed(self, parts: Parts) -> None:
        """No weights to send any more: the run stops with that reason, admission shut."""
        pid = watched(parts.fleet, parts.trainer.pid.remote())
        version = self._nudge(parts, SendFault("pause", self._middle(parts)))
        self._pending = DelayedSignal(f"refit {version}: transfer", [pid], signal.SIGKILL, 0.5)
        began = time.monotonic()
        reason = self._stops(parts, version)
        self.say(f"stopped {time.monotonic() - began:.1f} s after the update began: {reason}")
        self._judge_stop("trainer-killed-mid-transfer", parts, "its process is gone" in reason, reason)

    def _hit_transfer(self, parts: Parts, name: str, target: str, signum: int, pids: list[int] | None = None) -> None:
        """pids: which of the target's processes; all, if not given."""
        version = self._nudge(parts, SendFault("pause", self._middle(parts), pause_s=1.5))
        hit = pids or parts.fleet.pids()[target]
        self._pending = DelayedSignal(f"refit {version}: transfer", hit, signum, 0.5)
        result = self._refit(parts, version)
        proper = failed_in(result) == [State.SENDING] and [f"worker-{r.worker}" for r in result.replaced] == [target]
        self._judge(name, proper, result)

    def _generate_while_killing(self, parts: Parts, targets: dict[int, list[int]]) -> list[Any]:
        """Completions during which these processes of workers are killed, each worker's once it has taken a prompt."""
        prompts = [prompt.token_ids for prompt in parts.task.prompts(1) for _ in range(8)]
        long = with_tokens(parts, self._long_enough(parts, prompts))
        generated = threading.Event()
        killers = []
        for index, pids in targets.items():
            log = self.out / "logs" / f"worker-{index}.log"
            arguments = (log, len(received_requests(log)), pids, generated)
            killers.append(threading.Thread(target=kill_at_work, args=arguments))
        for killer in killers:
            killer.start()
        try:
            return self._generate(long, long.spread, prompts, self._version)
        finally:
            generated.set()
            for killer in killers:
                killer.join()

    def _long_enough(self, parts: Parts, prompts: list[tuple[int, ...]]) -> int:
        """Tokens of an answer that takes WORKED_S, by the pace of short ones; the first of these find caches empty."""
        short = with_tokens(parts, PACE_TOKENS)
        self._generate(short, short.spread, prompts, self._version)
        began = time.monotonic()
        self._generate(short, short.spread, prompts, self._version)
        tokens = round(PACE_TOKENS * WORKED_S / (time.monotonic() - began))
        return min(max(tokens, PACE_TOKENS), MOST_TOKENS)

    def _nudge(self, parts: Parts, fault: SendFault | None = None) -> int:
        """A new version in the trainer, and what is to go wrong when it is sent."""
        self._version += 1
        watched(parts.fleet, parts.trainer.nudge.remote(self._version))
        watched(parts.fleet, parts.trainer.set_fault.remote(fault))
        return self._version

    def _middle(self, parts: Parts) -> int:
        """A tensor before which some bytes have left, however large the chunks are."""
        return len(self._names(parts)) * 2 // 3

    def _names(self, parts: Parts) -> list[str]:
        manifest = watched(parts.fleet, parts.trainer.weights.remote("metadata", self._version))
        return [slot.name for slot in manifest.slots]

    def _uncleared(self, parts: Parts, clears: Literal["refused", "ignored"]) -> None:
        worker, timeout_s = parts.fleet.workers[1], self.recipe.policy.generation.dynamo_cfg.control_timeout_s
        parts.refit.workers[1] = replace(worker, control=UnclearedControl(worker.control, timeout_s, clears))

    def _stops(self, parts: Parts, version: int) -> str:
        try:
            result = parts.refit.update(version)
        except RefitError as error:
            return str(error)
        return f"the update to version {version} ended at version {result.version}"

    def _judge(self, name: str, proper: bool, result: RefitResult) -> None:
        """Admission may have been open at the beginning and at the end, at no time between."""
        shut = all(not t.admission for t in result.transitions[:-1]) and result.transitions[-1].admission
        self.checks.add(
            f"fault.{name}",
            proper and shut,
            f"version {result.version} of {result.asked} asked after {result.attempts} attempt(s) in "
            f"{result.total_s:.1f} s, {len(result.replaced)} replaced; " + "; ".join(map(describe, result.transitions)),
        )

    def _judge_stop(self, name: str, parts: Parts, proper: bool, reason: str) -> None:
        stopped = parts.refit.state is State.STOPPED and not is_open(parts)
        self.checks.add(f"fault.{name}", proper and stopped, f"{parts.refit.state}, admission shut: {reason}")


def send_later(pending: DelayedSignal) -> None:
    """Wait for the moment, then send the signal."""
    time.sleep(pending.delay_s)
    send(pending.signum, pending.pids)


def with_tokens(parts: Parts, tokens: int) -> Parts:
    """Whose answers have so many tokens each, whatever they are."""
    return replace(parts, sampling=replace(parts.sampling, max_tokens=tokens, ignore_eos=True))


def kill_at_work(log: Path, received: int, pids: list[int], generated: threading.Event) -> None:
    """Kill `pids` once their worker's log tells of more than `received` requests, unless all is `generated` before.

    The log, not the worker's metrics: these take up to two seconds to come from a worker at work on two cores.
    """
    while not generated.wait(0.02):
        if len(received_requests(log)) > received:
            send(signal.SIGKILL, pids)
            return


def send(signum: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def failed_in(result: RefitResult) -> list[State]:
    """The states in which attempts failed."""
    return [t.before for t in result.transitions if t.event is Event.FAILED]


def describe(transition: Transition) -> str:
    """One transition in a few words."""
    reason = f" ({transition.reason[:200]})" if transition.event is Event.FAILED else ""
    return f"{transition.before} → {transition.after}{reason}"


def is_open(parts: Parts) -> bool:
    """Whether a rollout is admitted, tried with one."""
    try:
        parts.pool.run(parts.client.complete_all([parts.task.prompts(1)[0].token_ids], parts.sampling))
    except RolloutError:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Run the cases: RECIPE OUT RUN_DIR CASE,… [key=value …]; 0 when each came to its end."""
    recipe, out, run_dir, only, *overrides = arguments
    FaultSession.only = tuple(filter(None, only.split(",")))
    return driver.run(Path(recipe), Path(out), Path(run_dir), [*SETTINGS, *overrides], FaultSession)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main(sys.argv[1:]))

"""A run that generates for later steps while it trains."""

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import cast

from functional.runtime.chat.server import ChatServer
from functional.runtime.errors import RefitError, RunError
from functional.runtime.fleet.fleet import Fleet
from functional.runtime.refit.parts import RefitResult
from functional.runtime.rollout.completion import Completion
from functional.runtime.rollout.gate import AdmissionGate
from functional.runtime.rollout.requests import Attempt
from functional.suite.ahead import Ahead
from functional.suite.async_checks import (
    TrainedOn,
    busy_and_idle,
    check_ages,
    check_no_update_in_flight,
    check_overlap,
    count_ages,
)
from functional.suite.intervals import Interval, union
from functional.suite.policy import Sample
from functional.suite.preflight import Prepared
from functional.suite.report import Asynchronous, Report
from functional.suite.sampling_filter import Flips
from functional.suite.session import Parts, Session
from functional.suite.watching import watched

PATIENCE_S = 30.0
"""How long the thread of rollouts may take to end: its next look at the fleet, and what that asks of the nodes."""


class AsyncSession(Session):
    """Trains on what is there while the engines generate what comes next.

    Whatever needs the trainer's weights to stay as they are holds `_weights`: a step, an update, the replacement of a
    worker, whichever thread finds that one was lost.
    """

    is_asynchronous = True

    @property
    def may_span(self) -> bool:
        return self._in_flight

    def __init__(self, prepared: Prepared, report: Report, out: Path, run_dir: Path) -> None:
        super().__init__(prepared, report, out, run_dir)
        given = self.recipe.grpo.async_grpo
        self._bound, self._in_flight = given.max_trajectory_age_steps, given.in_flight_weight_updates
        self._weights = threading.RLock()
        self._ahead: Ahead | None = None
        self._giving_up = False
        self._times_given_up = 0
        self._before: int | None = None  # the trainer's version before its last step
        self._own: dict[str, list[float]] = {}
        self._trained: list[TrainedOn] = []
        self._training: list[Interval] = []
        self._generating: list[Interval] = []
        self._generated = 0
        self._waited_s = 0.0

    def _take_steps(self, parts: Parts, first: int) -> None:
        steps = range(first, self.recipe.grpo.max_num_steps + 1)
        self._ahead = Ahead(lambda step: self._keep(parts, step), lambda: version_of(parts), steps, self._bound)
        parts.fleet.watch(self._stop_if_unwanted)  # wherever that thread waits for the fleet
        self._stack.callback(self._end_ahead, parts.fleet)
        began = time.time()
        self._ahead.start()
        super()._take_steps(parts, first)
        ended = time.time()
        with self._weights:  # a replacement under way comes to its end: what follows asks the same fleet
            self._ahead.give_up()
        self._ahead.stop(PATIENCE_S)
        self._ahead = None
        self._judge(Interval(began, ended))

    def _end_ahead(self, fleet: Fleet) -> None:
        """When the run is taken down: end the thread of rollouts, and with it a replacement under way."""
        if self._ahead is None:
            return
        try:
            self._ahead.stop(PATIENCE_S)
        except RunError:  # it waits for an answer of a worker or a node: for none any more once the fleet is gone
            self._note_memory()
            fleet.shutdown()
            self._ahead.stop(PATIENCE_S)

    def _keep(self, parts: Parts, step: int) -> list[Completion]:
        """The thread of rollouts: the samples of a step."""
        completions = self._complete(parts, step)
        self._generated += len(completions)
        self._generating = union([*self._generating, *(Interval(c.sent_at, c.answered_at) for c in completions)])
        return completions

    def _step(self, parts: Parts, step: int) -> None:
        assert self._ahead is not None
        trained, began = version_of(parts), time.monotonic()
        completions = self._ahead.take(step, trained, parts.fleet.check_control_plane)
        waited = time.monotonic() - began
        batch = self._note_rollouts(parts, step, completions)
        with self._weights:
            began_training = time.time()
            flips = self._score_own(parts, [*completions, *self._ahead.finished()], trained)
            samples = [self._sample(c, advantage, trained) for c, advantage in batch.accepted()]
            watched(parts.fleet, parts.trainer.keep.remote())
            metrics = watched(parts.fleet, parts.trainer.train.remote(samples, step, flips))
            self._training.append(Interval(began_training, time.time()))
        used = [TrainedOn.of(completion, trained) for completion, _ in batch.accepted()]
        self._trained += used
        self._waited_s += waited
        ages = [age for age, count in count_ages(used).items() for _ in range(count)]
        metrics |= {"age_mean": sum(ages) / len(ages), "age_max": float(max(ages)), "waited_s": waited}
        self._note_step(parts, step, batch, metrics)

    def _score_own(self, parts: Parts, completions: list[Completion], trained: int) -> Flips:
        """Have the trainer score, by the version before its present one, what that has made: it holds both until the
        step's snapshot takes the place of the older. Returns the flips among them."""
        before, self._before = self._before, trained
        wanted = {c.request_id for c in completions}
        self._own = {request: logprobs for request, logprobs in self._own.items() if request in wanted}
        made = [c for c in completions if c.problem is None and c.policy_version == c.last_version == before]
        if before is None or before == trained or not made:
            return Flips()
        samples = [Sample(c.prompt_token_ids, c.token_ids, c.logprobs) for c in made]
        scored, flips = watched(parts.fleet, parts.trainer.own_logprobs.remote(samples, before))
        self._own |= zip((c.request_id for c in made), scored, strict=True)
        found: Flips = flips
        return found

    def _sample(self, completion: Completion, advantage: float, trained: int) -> Sample:
        own = self._own.get(completion.request_id)
        is_present = completion.policy_version == completion.last_version == trained
        return Sample(
            completion.prompt_token_ids,
            completion.token_ids,
            completion.logprobs,
            advantage,
            own_logprobs=own,
            is_judged=is_present or own is not None,
        )

    def _bring(self, parts: Parts, step: int) -> RefitResult:
        assert self._ahead is not None
        with self._weights:
            result = super()._bring(parts, step)
        self._ahead.notice()
        return result

    def _validate(self, parts: Parts, step: int) -> dict[str, float]:
        if self._ahead is None:
            return super()._validate(parts, step)
        with self._ahead.held(parts.fleet.check_control_plane):
            return super()._validate(parts, step)

    def _drain_s(self) -> float | None:
        """A rollout is answered, or given up, within its own deadline."""
        dynamo = self.recipe.policy.generation.dynamo_cfg
        return dynamo.request_timeout_s + dynamo.control_timeout_s

    def _give_up_rollouts(self, gate: AdmissionGate, chat: ChatServer | None) -> Callable[[], None] | None:
        def give_up() -> None:
            if gate.idle_since() is not None:
                return  # whoever waits where admission is shut has met no weights yet
            self._times_given_up += 1
            self._giving_up = True
            try:
                if chat is not None:
                    chat.give_up("an update failed")
                if not gate.wait_until_idle(PATIENCE_S):
                    raise RefitError(f"rollouts are under way {PATIENCE_S:g} s after they were given up")
            finally:
                self._giving_up = False

        return give_up if self._in_flight else None

    def _is_given_up(self, state: Hashable) -> bool:
        """Not what began since: it waits until admission is open again, for weights that are proved."""
        _, times_given_up = cast("tuple[frozenset[int], int]", state)
        return self._giving_up and times_given_up != self._times_given_up

    def _stop_if_unwanted(self) -> None:
        """Ends the thread of rollouts when the run is being taken down: nothing may be replaced then."""
        if self._ahead is not None:
            self._ahead.look()

    def _fleet_state(self, parts: Parts) -> tuple[frozenset[int], int]:
        return frozenset(worker.instance_id for worker in parts.fleet.workers), self._times_given_up

    def _find_lost(self, parts: Parts) -> Mapping[int, str]:
        """Not while an update is under way, which may find and replace them."""
        with self._weights:
            self._stop_if_unwanted()
            return super()._find_lost(parts)

    def _make_whole(self, parts: Parts, step: int) -> None:
        """Unless an update has done so already."""
        with self._weights:
            self._stop_if_unwanted()
            if parts.fleet.lost_workers() or parts.refit.find_lost():
                super()._make_whole(parts, step)

    def _judge(self, span: Interval) -> None:
        training_s, generating_s, both_s = busy_and_idle(span, union(self._training), self._generating)
        drained_s = sum(refit.phases.get("drain", 0.0) for refit in self.report.refits)
        found = Asynchronous(
            bound=self._bound,
            in_flight_updates=self._in_flight,
            seconds=span.seconds,
            training_s=training_s,
            generating_s=generating_s,
            both_s=both_s,
            trainer_waited_s=self._waited_s + drained_s,
            trainer_idle_s=span.seconds - training_s,
            engines_idle_s=span.seconds - generating_s,
            ages=count_ages(self._trained),
            spanning=sum(s.policy_version != s.last_version for s in self._trained),
            unused=self._generated - len(self._trained),
        )
        self.report.asynchronous = found
        transitions = self.report.refit_transitions
        check_ages(self.checks, self._trained, self._bound, transitions, self._in_flight)
        check_overlap(self.checks, found)

    def _check_join(self, parts: Parts) -> list[Attempt]:
        attempts = super()._check_join(parts)
        if not self._in_flight:
            check_no_update_in_flight(self.checks, attempts, self.report.refit_transitions)
        return attempts


def version_of(parts: Parts) -> int:
    """The fleet's policy version."""
    return -1 if parts.refit.version is None else parts.refit.version

"""One policy update of a whole fleet: every worker moves to the new version and proves it, or goes back and proves it.

    probe warmed → admission shut, rollouts drained → workers paused, caches cleared → group formed, plan agreed on →
    tensors sent → proved on each worker → cleared again → version set and read back → resumed → probed → admission open

A failure anywhere leads to recovery: lost workers are replaced, the group is formed anew, the version is tried again;
after `attempts` failures the fleet goes back to the version before. Admission stays shut all the while, and for good
when that fails too. docs/refit.md has the states as a diagram and the interface for a trainer.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from functional.engine.errors import NOT_PROVED
from functional.engine.wire import Manifest
from functional.runtime.errors import InterruptedRunError, RefitError, RunError
from functional.runtime.fleet.control import ControlError, WorkerLostError, rpc_body
from functional.runtime.fleet.worker import Worker
from functional.runtime.refit.machine import Event, RefitMachine, State, Transition
from functional.runtime.refit.parts import (
    Probe,
    ProbeVerdict,
    RefitResult,
    Replace,
    Replacement,
    SourceLostError,
    WeightSource,
)
from functional.runtime.refit.probe import Finding, Noise, Sighting, judge
from functional.runtime.rollout.completion import Completion
from functional.runtime.rollout.gate import AdmissionGate

T = TypeVar("T")
GRACE_S = 10.0
"""How much longer than the engine's own deadline a control call waits before its worker counts as dead."""
ROLL_CALL_S = 10.0


class FleetRefit:
    """Moves a fleet from one policy version to the next. Constructing it shuts admission: nothing is proved yet."""

    def __init__(
        self,
        workers: list[Worker],
        source: WeightSource,
        gate: AdmissionGate,
        probe: Probe,
        *,
        address: str,
        timeout_s: float,
        attempts: int = 3,
        replace: Replace | None = None,
        ranks_per_worker: int = 1,
        has_prefix_cache: bool = True,
        on_step: Callable[[int, str], None] = lambda version, name: None,
        on_transition: Callable[[Transition], None] = lambda transition: None,
        drain_s: float | None = None,
        give_up_rollouts: Callable[[], None] | None = None,
        pool: Executor | None = None,
    ) -> None:
        """address: of this machine, for the transfer's rendezvous; timeout_s: the engine-side deadline of each wait.

        attempts: tries of one version; ranks_per_worker: tensor × pipeline parallel size of an engine;
        has_prefix_cache: of engines without, no clear is looked for; on_step hears the version being brought about and
        each step's name as it begins; pool runs the calls to the workers (a thread each, if not given); drain_s: how
        long the rollouts under way may take to end, if not timeout_s.
        give_up_rollouts: given, an update does not wait for the rollouts under way: engines freeze them, forget what
        they had computed of them, and go on with the new weights. After an attempt that failed they may have met
        others: it ends them all, and returns once none is under way.
        """
        self.workers = list(workers)
        self.version: int | None = None
        self._source = source
        self._gate = gate
        self._probe = probe
        self._address = address
        self._timeout_s = timeout_s
        self._noise = Noise()
        self._attempts = attempts
        self._replace = replace
        self._ranks_per_worker = ranks_per_worker
        self._has_prefix_cache = has_prefix_cache
        self._on_step = on_step
        self._drain_s = timeout_s if drain_s is None else drain_s
        self._give_up_rollouts = give_up_rollouts
        self._pool = pool or ThreadPoolExecutor(max_workers=len(workers) + 1, thread_name_prefix="refit")
        self._machine = RefitMachine(gate, on_transition)
        self._announced: tuple[int, Future[Manifest]] | None = None
        self._manifest: Manifest
        self._grouped = False
        self._no_plan: Mapping[str, str] = {}  # tensor → why the group came to no plan
        self._refused: RunError | None = None  # the proof that came with the tensors
        self._lost: dict[int, str] = {}
        self._warmed: dict[int, int] = {}  # instance → cached tokens its probe had before the clear
        self._warmed_at: int | None = None  # as the gate counts
        self._may_be_paused = False
        self._actions: dict[State, Callable[[RefitResult], None]] = {
            State.DRAINING: self._drain,
            State.PAUSING: self._pause,
            State.SENDING: self._send,
            State.PROVING: self._prove,
            State.CLEARING: self._clear,
            State.COMMITTING: self._commit,
            State.RESUMING: self._resume,
            State.PROBING: self._judge_probes,
        }

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def _target(self) -> int:
        """The version being brought about."""
        assert self._machine.version is not None
        return self._machine.version

    @property
    def log(self) -> list[Transition]:
        """Every transition since the start."""
        return self._machine.log

    def update(self, version: int) -> RefitResult:
        """Bring every worker to `version`, or back to the version before; either way proved, and admission open.

        With the version the fleet already has, its weights are sent and proved again: that is how a fleet takes in a
        replacement. Raises RefitError when neither succeeds; admission then stays shut, and no update is possible.
        """
        began, first = time.monotonic(), len(self.log)
        result = RefitResult(version)
        plan = [version] * self._attempts
        if self.version is not None and self.version != version:
            plan.append(self.version)
        try:
            self._begin(version, result)
            self._carry_out(plan, result)
        except RunError as error:
            what = "" if self.version is None else f"; the workers' last proved version was {self.version}"
            raise RefitError(f"update to policy version {version} failed: {error}{what}") from error
        finally:
            result.total_s = time.monotonic() - began
            result.transitions = self.log[first:]
        return result

    def find_lost(self) -> dict[int, str]:
        """Roll call: slot → why, of the workers that do not answer that their engine is alive."""

        def ask(worker: Worker) -> str | None:
            if worker.index in self._lost:
                return self._lost[worker.index]
            try:
                worker.control.call("liveness_probe", timeout_s=ROLL_CALL_S)
            except ControlError as error:
                return str(error)
            return None

        answers = self._on_all(ask)
        return {worker.index: why for worker, why in zip(self.workers, answers, strict=True) if why is not None}

    def stale_is_refused(self, version: int) -> str:
        """Control of the proof: ask a worker that was not updated to prove the source's weights of `version`.

        Returns the refusal of the first worker that answers. Raises RefitError if it accepts, which would make every
        proof worthless, or if none answers.
        """
        if self._grouped and not self._no_plan and (refusal := self._stale_by_plan(version)):
            return refusal
        proof, silent = self._source.proof(version), []
        prove = self._rpc("prove_weights", expected=proof.as_dict(), allow_unpaused=True)
        for worker in self.workers:
            try:
                prove(worker)
            except RunError as refusal:
                if NOT_PROVED in str(refusal):
                    return str(refusal)
                silent.append(str(refusal))  # a dead worker refuses nothing
            else:
                raise RefitError(
                    f"worker {worker.index} accepted a proof of weights it was never sent: the proof proves nothing"
                )
        raise RefitError(f"no worker could be asked: {'; '.join(silent)}")

    def _stale_by_plan(self, version: int) -> str | None:
        """The same of all workers at once, as updates are proved; None if one cannot be asked."""
        asked = self._pool.submit(self._source.prove_by_plan, version)
        prove = self._rpc("prove_by_plan", self._timeout_s + GRACE_S, timeout_s=self._timeout_s, allow_unpaused=True)
        try:
            self._beside(asked, prove)
        except RunError as refusal:
            if NOT_PROVED in str(refusal):
                return str(refusal)
            self._grouped = False
            return None
        raise RefitError("the workers accepted a proof of weights they were never sent: the proof proves nothing")

    def _begin(self, version: int, result: RefitResult) -> None:
        self._machine.version, self._machine.attempt = version, 1
        self._announced = version, self._pool.submit(self._source.metadata, version)
        lost = self.find_lost() if self.state in (State.UNPROVED, State.SERVING) else {}
        if not lost:
            with self._step("warm probe", result):
                self._warm()
            self._machine.fire(Event.BEGIN, f"update to version {version}")
            return
        self._machine.fire(Event.FAILED, "; ".join(lost.values()))
        self._recover(lost, result)

    def _carry_out(self, plan: list[int], result: RefitResult) -> None:
        """Try the planned versions one after the other until one is reached."""
        reasons: list[str] = []
        for number, version in enumerate(plan, 1):
            if number > 1:
                result.phases.clear()
                result.probes.clear()
            result.attempts = self._machine.attempt = number
            self._machine.version = version
            try:
                self._attempt(version, result)
            except InterruptedRunError:
                raise
            except SourceLostError as error:
                self._machine.fire(Event.FAILED, str(error))
                self._machine.fire(Event.GIVE_UP, "the sender of the weights is lost")
                raise
            except Exception as error:
                reasons.append(one_line(error))
                self._machine.fire(Event.FAILED, reasons[-1])
                if number == len(plan):
                    ends = [f"the first: {reasons[0]}", f"the last: {reasons[-1]}"]
                    summary = f"{number} attempts failed, {'; '.join(ends)}"
                    self._machine.fire(Event.GIVE_UP, summary)
                    raise RefitError(summary) from error
                self._recover(self.find_lost(), result, plan[number])
            else:
                return

    def _attempt(self, version: int, result: RefitResult) -> None:
        self._manifest = self._metadata(version)  # a version that is not held fails before a worker is touched
        while self.state is not State.SERVING:
            self._actions[self.state](result)
            if self.state is State.PROBING:
                self.version = result.version = version
                self._warmed.clear()
            self._machine.fire(Event.DONE)

    def _metadata(self, version: int) -> Manifest:
        """As asked for when the update began, before admission was shut; asked again by a later attempt."""
        announced, self._announced = self._announced, None
        if announced is not None and announced[0] == version:
            return announced[1].result()
        return self._source.metadata(version)

    def _recover(self, lost: Mapping[int, str], result: RefitResult, following: int | None = None) -> None:
        """Replace the lost workers and forget the group; the machine stands ready for the next attempt, or stopped."""
        self._grouped = False
        self._lost.clear()
        try:
            if self._give_up_rollouts is not None:
                self._give_up_rollouts()
            if lost:
                self._replace_lost(lost, result)
        except RunError as error:
            self._machine.fire(Event.GIVE_UP, one_line(error))
            raise
        done = [f"worker {index} replaced" for index in sorted(lost)]
        if following is not None:
            done.append(f"version {following} next")
        self._machine.fire(Event.DONE, ", ".join(done))

    def _replace_lost(self, lost: Mapping[int, str], result: RefitResult) -> None:
        if self._replace is None:
            raise RefitError(f"{'; '.join(lost.values())}; nothing here can replace a worker")
        began, old = time.monotonic(), {worker.index: worker.instance_id for worker in self.workers}
        self.workers = self._replace(lost)
        seconds = time.monotonic() - began
        new = {worker.index: worker.instance_id for worker in self.workers}
        result.replaced += [
            Replacement(index, lost.get(index, "died while another was replaced"), old[index], instance, seconds)
            for index, instance in new.items()
            if instance != old[index]
        ]

    def _drain(self, result: RefitResult) -> None:
        if self._give_up_rollouts is None:
            with self._step("drain", result):
                self._gate.close_and_drain(self._drain_s)
        now = self._gate.idle_since()
        has_served = now is None or self._warmed_at != now
        if has_served and not self._may_be_paused:  # rollouts may have driven the probe out of caches
            self._warmed.clear()
        self._warmed_at = now

    def _pause(self, result: RefitResult) -> None:
        with self._step("see cache", result):
            self._on_all(self._see_cache)
        mode, self._may_be_paused = "wait" if self._give_up_rollouts is None else "keep", True
        with self._step("pause", result):
            self._on_all(lambda w: w.control.call("pause_generation", {"mode": mode, "clear_cache": True}))

    def _send(self, result: RefitResult) -> None:
        result.bytes_sent, result.tensors = self._manifest.nbytes, len(self._manifest.slots)
        if not self._grouped:
            with self._step("form group", result):
                self._form_group()
            with self._step("agree on plan", result):
                self._agree()
            self._grouped = True
        result.by_plan, result.no_plan = not self._no_plan, dict(self._no_plan)
        if result.by_plan:
            self._send_by_plan(result)
            return
        with self._step("start", result):
            self._on_all(self._rpc("reset_reload"))
            self._on_all(self._rpc("start_weight_update", is_checkpoint_format=True))
        with self._step("transfer", result):
            self._transfer()
        with self._step("finish", result):
            self._on_all(self._rpc("finish_weight_update"))

    def _send_by_plan(self, result: RefitResult) -> None:
        """One call brings the tensors and their proof; what that refuses is for the state that follows."""
        self._refused = None
        with self._step("transfer", result):
            sent = self._pool.submit(self._source.send_by_plan, self._target)
            try:
                self._beside(sent, self._rpc("update_by_plan", self._timeout_s + GRACE_S, timeout_s=self._timeout_s))
            except RunError as error:
                if NOT_PROVED not in str(error):
                    raise
                self._refused = error
                return
            verdict = sent.result()
        result.phases["transfer"] -= verdict.prove_s
        result.phases["prove"] = verdict.prove_s
        result.proved, result.proved_bytes = verdict.proved, verdict.proved_bytes

    def _prove(self, result: RefitResult) -> None:
        if result.by_plan:
            if self._refused is not None:
                raise self._refused
            return
        with self._step("prove", result):
            proof = self._source.proof(self._target)
            self._on_all(self._rpc("prove_weights", expected=proof.as_dict()))
            result.proved, result.proved_bytes = proof.parameters, proof.nbytes

    def _clear(self, result: RefitResult) -> None:
        with self._step("clear", result):
            self._on_all(lambda w: w.control.call("flush_cache"))

    def _commit(self, result: RefitResult) -> None:
        label = str(self._target)
        with self._step("commit", result):
            self._on_all(lambda w: w.control.engine_rpc("commit_version", label))
            self._on_all(lambda w: check_label(w, label))

    def _resume(self, result: RefitResult) -> None:
        with self._step("resume", result):
            self._gate.try_out(self._target)
            self._on_all(lambda w: w.control.call("resume_generation"))
        self._may_be_paused = False

    def _judge_probes(self, result: RefitResult) -> None:
        with self._step("probe", result):
            first = self._on_all(lambda worker: self._probe(worker, 0))
            for worker, completion in zip(self.workers, first, strict=True):
                if completion.cached_tokens:
                    raise RefitError(
                        f"worker {worker.index}: {completion.cached_tokens} cached tokens on the probe after the "
                        "clear: the cache was not cleared"
                    )
            seen = [self._judge(*sight) for sight in zip(self.workers, self._sight(self.workers, first), strict=True)]
            result.probes += [verdict for verdict, _ in seen]
            for _, sightings in seen:
                self._noise.learn(sightings)

    @contextmanager
    def _step(self, name: str, result: RefitResult) -> Iterator[None]:
        self._on_step(self._target, name)
        began = time.monotonic()
        yield
        result.phases[name] = time.monotonic() - began

    def _on_all(self, action: Callable[[Worker], T]) -> list[T]:
        """Run `action` on every worker at once; raises the first failure after all have ended, and notes the lost."""
        futures = [self._pool.submit(action, worker) for worker in self.workers]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if isinstance(error, WorkerLostError):
                self._lost[error.index] = str(error)
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _rpc(self, method: str, patience_s: float | None = None, **arguments: Any) -> Callable[[Worker], None]:
        """Runs a method of a worker's extension under the version label it has: only the commit changes that."""
        label = "unproved" if self.version is None else str(self.version)
        body = rpc_body(method, label, **arguments)  # large, and the same for all
        return lambda worker: worker.control.send_rpc(method, body, patience_s)

    def _warm(self) -> None:
        """Have the probe's first prompt cached, and seen to be, while rollouts still run. It holds if none does."""
        self._warmed_at = self._gate.idle_since()
        try:
            self._on_all(self._see_cache)
        except InterruptedRunError:
            raise
        except RunError:
            pass  # a worker that cannot answer fails the attempt, once admission is shut

    def _see_cache(self, worker: Worker) -> None:
        """See the probe's first prompt hit the worker's prefix cache, so that a later miss shows the clear.

        Not again where it was seen before the drain, and no rollout was under way since. A worker that is paused since
        an earlier attempt was seen then.
        """
        if worker.instance_id in self._warmed:
            return
        if not self._has_prefix_cache:
            self._warmed[worker.instance_id] = 0
            return
        cached = self._probe(worker, 0).cached_tokens or self._probe(worker, 0).cached_tokens
        if cached == 0:
            raise RefitError(
                f"worker {worker.index}: a repeated probe did not hit the prefix cache; a clear would be unseen"
            )
        self._warmed[worker.instance_id] = cached

    def _form_group(self) -> None:
        port = self._source.listen(self._address)
        world_size, offsets = rank_geometry(len(self.workers), self._ranks_per_worker)
        offset_of = dict(zip((worker.index for worker in self.workers), offsets, strict=True))
        joined = self._pool.submit(self._source.connect, self._address, port, world_size)

        def join(worker: Worker) -> None:
            init_info = {
                "master_address": self._address,
                "master_port": port,
                "rank_offset": offset_of[worker.index],
                "world_size": world_size,
                "timeout_s": self._timeout_s,
            }
            body = {"engine_rpc": "init_weight_transfer_engine", "init_info": init_info}
            worker.control.call("init_weights_update_group", body, self._timeout_s + GRACE_S)

        self._beside(joined, join)
        joined.result()

    def _agree(self) -> None:
        agreed = self._pool.submit(self._source.agree, self._target)
        self._beside(agreed, self._rpc("learn_plan", self._timeout_s + GRACE_S, timeout_s=self._timeout_s))
        self._no_plan = agreed.result()

    def _transfer(self) -> None:
        update_info = {**self._manifest.info(), "timeout_s": self._timeout_s}
        patience_s = self._timeout_s + GRACE_S
        sent = self._pool.submit(self._source.send, self._target)
        self._beside(sent, self._rpc("update_weights", patience_s, update_info=update_info))
        sent.result()

    def _beside(self, own: "Future[Any]", action: Callable[[Worker], None]) -> None:
        """Run `action` on every worker beside the trainer's own part; a failed side ends the other's wait.

        A proof that is refused has been by all: nobody waits then, and the group remains good.
        """
        try:
            self._on_all(action)
        except Exception as error:
            if NOT_PROVED in str(error):
                raise
            self._source.abort(one_line(error))
            if isinstance(cause := own.exception(), SourceLostError):
                raise cause from error
            raise

    def _judge(self, worker: Worker, first: list[Sighting]) -> tuple[ProbeVerdict, list[Sighting]]:
        """The verdict on a worker, and the tokens it rests on."""
        reading, sightings = judge(
            first,
            lambda number: self._sight([worker], [self._probe(worker, number)])[0],
            self._noise,
            len(self.workers),
        )
        if reading.finding is Finding.OTHER:
            raise RefitError(
                f"worker {worker.index}: the probe fits the other version ({reading.previous:.4f} nats) better than "
                f"the new one ({reading.current:.4f} nats), {reading.tokens} tokens, z {reading.votes:.1f}"
            )
        return ProbeVerdict(worker.index, reading, self._warmed[worker.instance_id], 0), sightings

    def _sight(self, workers: Sequence[Worker], answers: Sequence[Completion]) -> list[list[Sighting]]:
        """Each worker's tokens; all answered the same prompt. Raises RefitError for an answer that is none."""
        for worker, completion in zip(workers, answers, strict=True):
            if completion.problem:
                raise RefitError(f"worker {worker.index}: probe after the update: {completion.problem}")
        score = self._source.score(self._target, answers[0].prompt_token_ids)
        other = score.previous if score.previous is not None else [None] * len(score.current)
        sightings = []
        for worker, completion in zip(workers, answers, strict=True):
            engine = completion.prompt_logprobs
            if len(engine) != len(score.current):
                raise RefitError(f"trainer: {len(score.current)} scores for {len(engine)} tokens of the probe")
            seen = [Sighting(*values) for values in zip(engine, score.current, other, strict=True)]
            if not all(sighting.is_finite for sighting in seen):
                raise RefitError(
                    f"worker {worker.index}: a log-prob of the probe is not finite in the engine or the trainer"
                )
            sightings.append(seen)
        return sightings


def rank_geometry(num_workers: int, ranks_per_worker: int) -> tuple[int, list[int]]:
    """World size and each worker's rank offset in a transfer group: the sender is rank 0, engines follow in order."""
    return 1 + num_workers * ranks_per_worker, [1 + index * ranks_per_worker for index in range(num_workers)]


def check_label(worker: Worker, label: str) -> None:
    """Raise RefitError unless the worker says that it has this version."""
    found = worker.control.call("get_weight_version").get("version")
    if found != label:
        raise RefitError(f"worker {worker.index} reports version {found!r}, expected {label!r}")


def one_line(error: BaseException) -> str:
    """The error's text without line breaks; an error that is none of ours is named."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, RunError) else f"{type(error).__name__}: {text}"

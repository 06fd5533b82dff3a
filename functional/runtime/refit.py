"""One policy update of a whole fleet: every worker moves to the new version and proves it, or admission stays shut.

    shut admission, drain → warm the probe → pause and clear → (form the group) → reset, start → update ∥ send → finish
    → prove on the worker → clear again → set version → resume → probe → reopen

A failure at any point raises RefitError and leaves the gate shut.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from functional.runtime.errors import RefitError, RunError
from functional.runtime.fleet import Worker
from functional.runtime.rollout import AdmissionGate, Completion

T = TypeVar("T")


@dataclass(frozen=True)
class ProbeScore:
    """The trainer's log-probs of a probe's tokens, nats, one each: under this version, and the one before (if any)."""

    current: list[float]
    previous: list[float] | None


class WeightSource(Protocol):
    """The trainer's side of an update; an implementation may sit in another process."""

    def listen(self, address: str) -> int:
        """Drop any old transfer group, bind a rendezvous on `address` and return its port."""

    def connect(self, address: str, port: int, world_size: int) -> None:
        """Join the transfer group as rank 0; returns when all have joined."""

    def update_info(self) -> dict[str, Any]:
        """Names, dtypes, shapes and packing of what `send` sends, as the engine's update call takes them."""

    def expected_proof(self) -> dict[str, Any]:
        """What each engine must hold afterwards: engine parameter name → dtype, shape, sha256."""

    def send(self) -> None:
        """Send every tensor of the current policy. Has its own deadline."""

    def abort(self, reason: str) -> None:
        """Make a blocked `connect` or `send` of another thread raise."""

    def score(self, completion: Completion) -> ProbeScore:
        """Log-probs of the completion's tokens under the policy being sent, and under the one before."""


class Probe(Protocol):
    """Completes a fixed prompt on one worker, past the admission gate. Its prompt spans more than one cache block."""

    def __call__(self, worker: Worker) -> Completion: ...


@dataclass(frozen=True)
class ProbeVerdict:
    """Mean |engine − trainer| log-prob over a probe's tokens, nats; `previous` is None for a first version."""

    worker: int
    current: float
    previous: float | None
    cached_before: int
    cached_after: int


@dataclass
class RefitResult:
    """What an update did. `phases`: seconds by name; `probes`: one verdict a worker."""

    version: int
    bytes_sent: int
    tensors: int
    proved: int
    phases: dict[str, float] = field(default_factory=dict)
    probes: list[ProbeVerdict] = field(default_factory=list)
    total_s: float = 0.0


class FleetRefit:
    """Moves a fixed fleet from one policy version to the next. `noise`: how far, in nats, a probe may lie from the
    trainer's log-probs; `on_step` hears the version and each step's name as it begins."""

    def __init__(
        self,
        workers: list[Worker],
        source: WeightSource,
        gate: AdmissionGate,
        probe: Probe,
        *,
        address: str,
        timeout_s: float,
        noise: float,
        on_step: Callable[[int, str], None] = lambda version, name: None,
    ) -> None:
        self._workers = workers
        self._source = source
        self._gate = gate
        self._probe = probe
        self._address = address
        self._timeout_s = timeout_s
        self._noise = noise
        self._on_step = on_step
        self._grouped = False
        self.version = "initial"
        self._pool = ThreadPoolExecutor(max_workers=len(workers) + 1, thread_name_prefix="refit")

    def update(self, version: int) -> RefitResult:
        """Bring every worker to `version` and reopen admission. Raises RefitError; the gate then stays shut."""
        began = time.monotonic()
        try:
            result = self._update(version)
        except RunError as error:
            self._grouped = False
            raise RefitError(f"update to policy version {version} failed: {error}") from error
        result.total_s = time.monotonic() - began
        return result

    def _update(self, version: int) -> RefitResult:
        info, proof = self._source.update_info(), self._source.expected_proof()
        result = RefitResult(version, info["total_bytes"], len(info["names"]), len(proof))
        info = {key: value for key, value in info.items() if key != "total_bytes"}
        with self._step("drain", result):
            self._gate.close_and_drain(self._timeout_s)
        with self._step("warm probe", result):
            cached_before = self._on_all(self._warm)
        with self._step("pause", result):
            self._on_all(lambda w: w.control.call("pause_generation", {"mode": "wait", "clear_cache": True}))
        if not self._grouped:
            with self._step("form group", result):
                self._form_group()
        with self._step("start", result):
            self._on_all(lambda w: self._rpc(w, "reset_reload"))
            self._on_all(lambda w: self._rpc(w, "start_weight_update", is_checkpoint_format=True))
        with self._step("transfer", result):
            self._transfer(info)
        with self._step("finish", result):
            self._on_all(lambda w: self._rpc(w, "finish_weight_update"))
        with self._step("prove", result):
            self._on_all(lambda w: self._rpc(w, "prove_weights", expected=proof))
        with self._step("clear", result):
            self._on_all(lambda w: w.control.call("flush_cache"))
        with self._step("commit", result):
            self._on_all(lambda w: w.control.update("commit_version", str(version)))
            self.version = str(version)
            self._on_all(self._check_version)
        with self._step("resume", result):
            self._on_all(lambda w: w.control.call("resume_generation"))
        with self._step("probe", result):
            result.probes = [
                self._judge(worker, before, self._probe(worker))
                for worker, before in zip(self._workers, cached_before, strict=True)
            ]
        self._gate.reopen()
        return result

    def stale_is_refused(self) -> str:
        """Control of the proof: ask a worker that was not updated to prove the trainer's weights.

        Returns the worker's refusal. Raises RefitError if it accepts, which would make every proof worthless.
        """
        worker = self._workers[0]
        try:
            self._rpc(worker, "prove_weights", expected=self._source.expected_proof(), allow_unpaused=True)
        except RunError as refusal:
            return str(refusal)
        raise RefitError(
            f"worker {worker.index} accepted a proof of weights it was never sent: the proof proves nothing"
        )

    @contextmanager
    def _step(self, name: str, result: RefitResult) -> Iterator[None]:
        self._on_step(result.version, name)
        began = time.monotonic()
        yield
        result.phases[name] = time.monotonic() - began

    def _on_all(self, action: Callable[[Worker], T]) -> list[T]:
        """Run `action` on every worker at once; raises the first failure after all have ended."""
        futures = [self._pool.submit(action, worker) for worker in self._workers]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _rpc(self, worker: Worker, method: str, **arguments: Any) -> None:
        worker.control.update(method, self.version, **arguments)

    def _warm(self, worker: Worker) -> int:
        """Make the probe's prompt hit the worker's prefix cache, so that a later miss shows the clear."""
        self._probe(worker)
        cached = self._probe(worker).cached_tokens
        if cached == 0:
            raise RefitError(
                f"worker {worker.index}: a repeated probe did not hit the prefix cache; a clear would be unseen"
            )
        return cached

    def _form_group(self) -> None:
        port = self._source.listen(self._address)
        world_size = 1 + len(self._workers)
        joined = self._pool.submit(self._source.connect, self._address, port, world_size)
        self._with_workers(
            joined,
            lambda w: w.control.call(
                "init_weights_update_group",
                {
                    "engine_rpc": "init_weight_transfer_engine",
                    "init_info": {
                        "master_address": self._address,
                        "master_port": port,
                        "rank_offset": 1 + self._workers.index(w),
                        "world_size": world_size,
                        "timeout_s": self._timeout_s,
                    },
                },
                self._timeout_s + 20,
            ),
        )
        self._grouped = True

    def _transfer(self, info: dict[str, Any]) -> None:
        sent = self._pool.submit(self._source.send)
        update_info = {**info, "timeout_s": self._timeout_s}
        self._with_workers(
            sent, lambda w: self._rpc(w, "update_weights", update_info=update_info, timeout_s=self._timeout_s + 20)
        )

    def _with_workers(self, own: Any, action: Callable[[Worker], Any]) -> None:
        """Run `action` on every worker beside the trainer's own part; a failed side ends the other's wait."""
        try:
            self._on_all(action)
        except RunError as error:
            self._source.abort(str(error))
            own.exception()
            raise
        own.result()

    def _check_version(self, worker: Worker) -> None:
        found = worker.control.call("get_weight_version").get("version")
        if found != self.version:
            raise RefitError(f"worker {worker.index} reports version {found!r}, expected {self.version!r}")

    def _judge(self, worker: Worker, cached_before: int, completion: Completion) -> ProbeVerdict:
        if completion.problem:
            raise RefitError(f"worker {worker.index}: probe after the update: {completion.problem}")
        if completion.cached_tokens:
            raise RefitError(
                f"worker {worker.index}: {completion.cached_tokens} cached tokens on the probe after the clear: "
                "the cache was not cleared"
            )
        score = self._source.score(completion)
        current = mean_difference(completion.logprobs, score.current)
        previous = None if score.previous is None else mean_difference(completion.logprobs, score.previous)
        if current > self._noise:
            raise RefitError(
                f"worker {worker.index}: the probe's log-probs lie {current:.4f} nats from the trainer's at the new "
                f"version (at most {self._noise:g})"
            )
        if previous is not None and previous <= current:
            raise RefitError(
                f"worker {worker.index}: the probe fits the old version ({previous:.4f} nats) no worse than the new "
                f"one ({current:.4f} nats)"
            )
        return ProbeVerdict(worker.index, current, previous, cached_before, completion.cached_tokens)


def mean_difference(a: list[float] | tuple[float, ...], b: list[float]) -> float:
    """Mean |a − b| over tokens, nats."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)

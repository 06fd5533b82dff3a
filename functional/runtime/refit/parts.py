"""What a refit works with: the trainer's weights, a probe, a way to replace a worker; and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from functional.engine.plan_wire import Verdict
from functional.engine.proof import EngineProof
from functional.engine.wire import Manifest
from functional.runtime.errors import RefitError
from functional.runtime.fleet.worker import Worker
from functional.runtime.refit.machine import Transition
from functional.runtime.refit.probe import ProbeScore, Reading
from functional.runtime.rollout.completion import Completion


class SourceLostError(RefitError):
    """The trainer that sends the weights is gone: there is nothing to retry with."""


class WeightSource(Protocol):
    """The trainer's side of an update; an implementation may sit in another process.

    Any call may raise RefitError for a failure that can be tried again, SourceLostError for one that cannot. A version
    that is not held is a RefitError.
    """

    def metadata(self, version: int) -> Manifest:
        """Names, dtypes, shapes and packing of what `send` sends, in its order, without going through the tensors."""

    def listen(self, address: str) -> int:
        """Drop any old transfer group, bind a rendezvous on `address` and return its port."""

    def connect(self, address: str, port: int, world_size: int) -> None:
        """Join the transfer group as rank 0; returns when all have joined."""

    def agree(self, version: int) -> dict[str, str]:
        """Agree with all engines, in a new group and beside their `learn_plan`, on how tensors like this version's
        become what each rank holds.

        Returns tensor → why updates are not by plan; nothing if they are. Raises RefitError, by tensor, where a proof
        is not possible: some part is held by no rank, say. Has its own deadline.
        """

    def send_by_plan(self, version: int) -> Verdict:
        """Send every tensor, and have all engines prove what they hold then; the key is drawn after the last copy. Only
        after `agree` came to a plan, in the same group. Has its own deadline."""

    def prove_by_plan(self, version: int) -> Verdict:
        """Have all engines prove that they hold this version, sent before or not. Otherwise as `send_by_plan`."""

    def send(self, version: int) -> None:
        """Send every tensor by vLLM's checkpoint protocol. Has its own deadline."""

    def proof(self, version: int) -> EngineProof:
        """What an engine with this version's weights holds, sent before or not. Has its own deadline.

        A key is drawn in each call, so a call after the workers have finished draws it after their last copy.
        """

    def abort(self, reason: str) -> None:
        """Make a blocked `connect` or `send` of another thread raise."""

    def score(self, version: int, prompt: Sequence[int]) -> ProbeScore:
        """Log-probs of the prompt's tokens but the first, under this version and the other one held: of the model's own
        distribution, at temperature 1."""


class Probe(Protocol):
    """Has a worker complete a round's prompt by one token, past the admission gate, and tell the log-prob of each of
    the prompt's tokens (`Sampling.prompt_logprobs`).

    Rounds count from 0, fewer than `probe.MAX_ROUNDS`. Prompts are fixed; each spans more than one cache block.
    """

    def __call__(self, worker: Worker, round_number: int) -> Completion: ...


class Replace(Protocol):
    """Ends the lost workers (slot → why it counts as lost) and returns all workers, new ones in the slots of the lost.

    Returns once exactly these are registered. Raises RunError when that cannot be done.
    """

    def __call__(self, lost: Mapping[int, str]) -> list[Worker]: ...


@dataclass(frozen=True)
class ProbeVerdict:
    """A worker's probe after an update: what it says; cached tokens of its first prompt before the clear and after."""

    worker: int
    reading: Reading
    cached_before: int
    cached_after: int


@dataclass(frozen=True)
class Replacement:
    """A worker that took a lost one's slot. `seconds`: until it was registered and routed."""

    worker: int
    reason: str
    old_instance: int
    new_instance: int
    seconds: float


@dataclass
class RefitResult:
    """What an update did. `asked` and `version` differ after a return to the version before.

    proved: parameters of a worker, all ranks together; proved_bytes: of each rank. by_plan: whether the weights were
    copied in place; if not, no_plan: tensor → why not. phases: seconds by name, of the last attempt; probes: one
    verdict a worker.
    """

    asked: int
    version: int | None = None
    attempts: int = 0
    bytes_sent: int = 0
    tensors: int = 0
    proved: int = 0
    proved_bytes: list[int] = field(default_factory=list)
    by_plan: bool = False
    no_plan: dict[str, str] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    probes: list[ProbeVerdict] = field(default_factory=list)
    replaced: list[Replacement] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def reached(self) -> bool:
        return self.version == self.asked

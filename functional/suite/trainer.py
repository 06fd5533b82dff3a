"""The trainer as a Ray actor on its own device, and the adapter through which a refit drives it.

A trainer of several ranks is one actor for each. The session and the refit know the first; it asks the others for their
part of whatever all do together.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from functional.engine.group import Rendezvous, join_store
from functional.engine.plan_wire import Verdict
from functional.engine.proof import EngineProof
from functional.engine.wire import Manifest
from functional.runtime.errors import ProcessDiedError, RefitError, RunError
from functional.runtime.fleet.sockets import NodeSockets
from functional.runtime.recipe.environment import LOOPBACK
from functional.runtime.recipe.model import Recipe
from functional.runtime.refit.expected import NamedTensors
from functional.runtime.refit.parts import SourceLostError
from functional.runtime.refit.probe import ProbeScore
from functional.suite.checkpoint import TrainingInfo
from functional.suite.policy import Sample
from functional.suite.sampling_filter import Flips
from functional.suite.send_faults import FaultyWeights, SendFault
from functional.suite.shards import Place
from functional.suite.trainer_rank import TrainerRank

GRACE_S = 30.0
"""How much longer than the actor's own deadlines a call to it may take."""
LAST_WORDS_S = 2.0
"""For another rank's failure to be told, once an exchange with it has failed here."""
WATCH_INTERVAL_S = 0.5


@ray.remote(num_cpus=0, num_gpus=1, max_restarts=0, concurrency_groups={"life": 2})
class OtherRank:
    """A rank of the trainer but the first. Its calls run one after the other, in the order that they were made in."""

    def __init__(self, recipe: Recipe, model_dir: Path, resumed: Path | None, place: Place) -> None:
        self._at_first = NodeSockets.here()
        self._arguments = recipe, model_dir, resumed, place
        self._own: TrainerRank | None = None

    def call(self, method: str, *arguments: Any) -> None:
        """This rank's part of what all do. The first call is `form`, with the port where the ranks meet."""
        if method == "form":
            (port,) = arguments
            self._own = TrainerRank(*self._arguments, join_store(LOOPBACK, port, self._arguments[-1].startup_s))
        else:
            getattr(self._own, method)(*arguments)

    @ray.method(concurrency_group="life")
    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="life")
    def sockets_at_first(self) -> NodeSockets:
        """What this process listened on before it had anything of a trainer: Ray's."""
        return self._at_first

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Does not return: who waits for it hears of the end of this process."""
        threading.Event().wait()


@ray.remote(num_cpus=0, num_gpus=1, max_restarts=0, max_concurrency=4)
class Trainer:
    """Holds the policy. Several calls may run at once, so that `abort` reaches a blocked `send`."""

    def __init__(
        self,
        recipe: Recipe,
        model_dir: Path,
        resumed: Path | None = None,
        place: Place | None = None,
        others: Sequence[Any] = (),
    ) -> None:
        """resumed: the checkpoint that the run goes on from. others: the `OtherRank`s, from rank 1 on."""
        self._at_first = NodeSockets.here()
        timeout_s = recipe.policy.generation.dynamo_cfg.control_timeout_s
        self._others = Others(others, timeout_s)
        if others:
            meeting = Rendezvous(LOOPBACK, 0, recipe.policy.generation.dynamo_cfg.startup_timeout_s)
            with self._others.beside("form", meeting.port):
                self._own = TrainerRank(recipe, model_dir, resumed, place or Place(), meeting.store)
        else:
            self._own = TrainerRank(recipe, model_dir, resumed, place or Place())
        self._calls = threading.local()
        self._weights = FaultyWeights(
            self._own.layout,
            self._tensors,
            self._score,
            self._own.policy.config,
            transport=recipe.transport.name,
            device=self._own.policy.device,
            timeout_s=timeout_s,
            proof=recipe.proof,
            resident=not others,
        )
        if recipe.faults.pause_send_version is not None:
            self._weights.fault = SendFault(
                "pause", recipe.faults.pause_send_after, recipe.faults.pause_send_version, recipe.faults.pause_send_s
            )

    def ready(self) -> int:
        """Number of parameters; answers once the model is loaded."""
        return self._own.parameters

    def foresee(self, prompt: Sequence[int]) -> None:
        """Score this prompt's tokens, now and whenever the weights change: a probe with it is answered from that."""
        self._together("foresee", prompt)

    def keep(self) -> None:
        """As `TrainerRank.keep`."""
        self._together("keep")

    def own_logprobs(self, samples: list[Sample], version: int) -> tuple[list[list[float]], Flips]:
        """As `TrainerRank.own_logprobs`."""
        found: tuple[list[list[float]], Flips] = self._together("own_logprobs", samples, version)
        return found

    def train(self, samples: list[Sample], version: int, flips: Flips | None = None) -> dict[str, float]:
        """As `TrainerRank.train`."""
        metrics: dict[str, float] = self._together("train", samples, version, flips)
        return metrics

    def save(self, folder: Path, info: TrainingInfo) -> int:
        """As `TrainerRank.save`."""
        size: int = self._together("save", folder, info)
        return size

    def agreement(self, most: int) -> dict[str, list[float]]:
        """As `TrainerRank.agreement`."""
        return self._own.agreement(most)

    def go_back(self, version: int) -> None:
        """As `TrainerRank.go_back`."""
        self._together("go_back", version)

    def start_over(self, version: int) -> None:
        """As `TrainerRank.start_over`."""
        self._together("start_over", version)

    def nudge(self, version: int) -> dict[str, float]:
        """As `TrainerRank.nudge`."""
        figures: dict[str, float] = self._together("nudge", version)
        return figures

    def score_nudged(self, prompts: Sequence[Sequence[int]], size: float, seed: int) -> list[list[float]]:
        """As `TrainerRank.score_nudged`."""
        scores: list[list[float]] = self._together("score_nudged", prompts, size, seed)
        return scores

    def set_fault(self, fault: SendFault | None) -> None:
        """What goes wrong in the sends to come."""
        self._weights.fault = fault

    def pid(self) -> int:
        return os.getpid()

    def sockets_at_first(self) -> NodeSockets:
        """As `OtherRank.sockets_at_first`."""
        return self._at_first

    def passes(self) -> int:
        """How often a trainer of several ranks has gathered its weights."""
        return self._own.passes

    def weights(self, method: str, *arguments: Any) -> Any:
        """Call a method of the weight source."""
        passes: list[Generator[Any, None, None]] = []
        self._calls.passes = passes
        try:
            return getattr(self._weights, method)(*arguments)
        finally:
            # A send that failed leaves its pass through the weights half done, and the other ranks in the midst of it.
            for one in passes:
                one.close()

    def _together(self, method: str, *arguments: Any) -> Any:
        """What every rank does; the first one's answer."""
        with self._others.beside(method, *arguments):
            return getattr(self._own, method)(*arguments)

    def _tensors(self, version: int) -> NamedTensors:
        if not self._others:
            return self._own.tensors(version)
        self._calls.passes.append(one := self._gathering(version))
        return one

    def _gathering(self, version: int) -> Generator[tuple[str, Any], None, None]:
        with self._others.beside("follow", version):
            yield from self._own.tensors(version)

    def _score(self, version: int, prompt: Sequence[int]) -> ProbeScore:
        own = self._own
        current = self._scores(own.version, prompt)
        if own.kept is None or own.kept == own.version:
            return ProbeScore(current, None)
        previous = self._scores(own.kept, prompt)
        return ProbeScore(current, previous) if version == own.version else ProbeScore(previous, current)

    def _scores(self, version: int, prompt: Sequence[int]) -> list[float]:
        foreseen = self._own.foreseen.scores(version, prompt)
        if foreseen is not None:
            return foreseen
        scores: list[float] = self._together("score", version, prompt)
        return scores


class Others:
    """The trainer's ranks but the first, as the first knows them."""

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        """timeout_s: of their part of anything, once the first has done its own."""
        self._actors = actors
        self._timeout_s = timeout_s
        self._turn = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._actors)

    @contextmanager
    def beside(self, method: str, *arguments: Any) -> Iterator[None]:
        """The same on each of them meanwhile, one thing at a time. Raises RefitError with the rank that failed, or that
        is gone, where it is the cause."""
        if not self._actors:
            yield
            return
        if not self._turn.acquire(timeout=self._timeout_s + GRACE_S):
            raise RefitError(f"trainer: its ranks are still at something else after {self._timeout_s + GRACE_S:g} s")
        try:
            asked = [actor.call.remote(method, *arguments) for actor in self._actors]
            try:
                yield
            except Exception as error:
                if problem := self._problem(asked, LAST_WORDS_S, error):
                    raise RefitError(problem) from error
                raise
            if problem := self._problem(asked, self._timeout_s):
                raise RefitError(problem)
        finally:
            self._turn.release()

    def _problem(self, asked: Sequence[Any], timeout_s: float, own: Exception | None = None) -> str | None:
        """What became of a rank that did not do its part. own: how the first rank failed, which a rank that failed too
        has nothing to add to."""
        deadline = time.monotonic() + timeout_s
        for rank, reference in enumerate(asked, start=1):
            try:
                ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                late = f"trainer rank {rank} of {1 + len(asked)} has not answered within {timeout_s:g} s"
                return late if own is None else f"{brief(own)}; {late}"
            except RayActorError as error:
                return f"trainer rank {rank} of {1 + len(asked)}: its process is gone ({type(error).__name__})"
            except RayTaskError as error:
                if own is None:
                    return f"trainer rank {rank} of {1 + len(asked)}: {brief(error.cause or error)}"
        return None


def brief(error: BaseException) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class RemoteWeights:
    """A `WeightSource` whose every call runs in the trainer actor; its failures become RefitError, its end
    SourceLostError."""

    def __init__(self, trainer: Any, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """check: raises RunError when another rank of the trainer is gone, while this one may still wait for it."""
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._check = check

    def metadata(self, version: int) -> Manifest:
        manifest: Manifest = self._ask("metadata", version)
        return manifest

    def listen(self, address: str) -> int:
        port: int = self._ask("listen", address)
        return port

    def connect(self, address: str, port: int, world_size: int) -> None:
        self._ask("connect", address, port, world_size)

    def agree(self, version: int) -> dict[str, str]:
        problems: dict[str, str] = self._ask("agree", version)
        return problems

    def send_by_plan(self, version: int) -> Verdict:
        verdict: Verdict = self._ask("send_by_plan", version)
        return verdict

    def prove_by_plan(self, version: int) -> Verdict:
        verdict: Verdict = self._ask("prove_by_plan", version)
        return verdict

    def send(self, version: int) -> None:
        self._ask("send", version)

    def proof(self, version: int) -> EngineProof:
        proof: EngineProof = self._ask("proof", version)
        return proof

    def exchange(self, version: int) -> None:
        """As `LocalWeights.exchange`."""
        self._ask("exchange", version)

    def abort(self, reason: str) -> None:
        self._ask("abort", reason)

    def score(self, version: int, prompt: Sequence[int]) -> ProbeScore:
        score: ProbeScore = self._ask("score", version, prompt)
        return score

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The actor's own deadline comes first."""
        asked, deadline = self._trainer.weights.remote(method, *arguments), time.monotonic() + self._timeout_s + GRACE_S
        try:
            while not ray.wait([asked], timeout=WATCH_INTERVAL_S)[0] and time.monotonic() < deadline:
                self._check()
            return ray.get(asked, timeout=0)
        except ProcessDiedError as error:
            raise SourceLostError(str(error)) from error
        except RayTaskError as error:
            self._tell_if_gone(error)
            raise RefitError(f"trainer: {brief(error.cause or error)}") from error
        except RayActorError as error:
            raise SourceLostError(f"trainer: its process is gone ({type(error).__name__})") from error
        except RayError as error:
            raise RefitError(f"trainer: {method}: {' '.join(str(error).split())[:300]}") from error

    def _tell_if_gone(self, error: RayError) -> None:
        """Another rank that is gone is the cause of what failed here."""
        try:
            self._check()
        except ProcessDiedError as gone:
            raise SourceLostError(str(gone)) from error


class TrainerRanks:
    """Every rank of a run's trainer, as the driver has them."""

    def __init__(
        self, recipe: Recipe, model_dir: Path, resumed: Path | None, options: Mapping[str, Any], gpus: int
    ) -> None:
        """Starts them. options: of Ray, for each actor; gpus: as in `Place`."""
        dynamo, count = recipe.policy.generation.dynamo_cfg, recipe.trainer_ranks
        deadlines = dynamo.control_timeout_s, dynamo.startup_timeout_s
        places = [Place(rank, count, *deadlines, gpus) for rank in range(count)]
        other: Any = OtherRank
        first: Any = Trainer
        self.others = [other.options(**options).remote(recipe, model_dir, resumed, place) for place in places[1:]]
        self.first = first.options(**options).remote(recipe, model_dir, resumed, places[0], self.others)
        self._lives = [actor.live.remote() for actor in self.others]

    def check(self) -> None:
        """Raises ProcessDiedError for a rank but the first that is gone: of the first, its calls tell."""
        if not self._lives:
            return
        for gone in ray.wait(self._lives, num_returns=len(self._lives), timeout=0)[0]:
            rank = 1 + self._lives.index(gone)
            raise ProcessDiedError(f"trainer rank {rank} of {1 + len(self._lives)}: its process is gone")

    def pids(self) -> dict[str, list[int]]:
        """Process ids by name, once all ranks are up. Raises RunError for one that is gone."""
        try:
            asked = ray.get([actor.pid.remote() for actor in (self.first, *self.others)], timeout=GRACE_S)
        except RayError as error:
            self.check()
            raise RunError(f"trainer: {brief(error)}") from error
        return {f"trainer-{rank}": [pid] for rank, pid in enumerate(asked)}

    def close(self) -> None:
        for actor in (self.first, *self.others):
            ray.kill(actor)

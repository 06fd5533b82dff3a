"""The trainer as a Ray actor on its own device, and the adapter through which a refit drives it."""

import copy
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from functional.engine.plan_wire import Verdict
from functional.engine.proof import EngineProof
from functional.engine.wire import Manifest, Slot
from functional.runtime.errors import RefitError
from functional.runtime.recipe.environment import SHARED_GPU
from functional.runtime.recipe.model import Recipe
from functional.runtime.refit.expected import NamedTensors
from functional.runtime.refit.parts import SourceLostError
from functional.runtime.refit.probe import ProbeScore
from functional.suite.checkpoint import TrainingInfo, read_tensors, write_checkpoint
from functional.suite.host_copy import HostCopy
from functional.suite.policy import WHOLE, Policy, Sample, collate
from functional.suite.sampling_filter import Flips, SamplingFilter
from functional.suite.send_faults import FaultyWeights, SendFault

NUDGE = 0.15
"""Noise of `Trainer.nudge`, in standard deviations of the tensor it is added to."""
GRACE_S = 30.0
"""How much longer than the actor's own deadlines a call to it may take."""


@ray.remote(num_cpus=0, num_gpus=1, max_restarts=0, max_concurrency=4)
class Trainer:
    """Holds the policy. Several calls may run at once, so that `abort` reaches a blocked `send`."""

    def __init__(self, recipe: Recipe, model_dir: Path, resumed: Path | None = None) -> None:
        """resumed: the checkpoint that the run goes on from."""
        policy, generation = recipe.policy, recipe.policy.generation
        if recipe.cluster.share_gpu:
            os.environ.update(SHARED_GPU)
        self._loss = recipe.loss_fn
        self._policy = Policy(
            model_dir,
            recipe.cluster.device,
            optimizer=policy.optimizer,
            scheduler=policy.scheduler,
            max_grad_norm=policy.max_grad_norm,
            temperature=generation.temperature,
            kept=WHOLE if recipe.faults.score_unfiltered else SamplingFilter(generation.top_k, generation.top_p),
            micro_batch_size=policy.micro_batch_size,
            keep_reference=recipe.loss_fn.reference_policy_kl_penalty > 0,
            seed=recipe.grpo.seed,
        )
        self._version = 0
        if resumed is not None:
            info = TrainingInfo.of(resumed)
            self._policy.resume(*read_tensors(resumed), info.optimizer_steps)
            self._version = info.step
        self._saves_optimizer = recipe.checkpointing.save_optimizer
        self._copy = HostCopy(self._policy.weights)
        self._kept: int | None = None
        self._foreseen = Foreseen(self._policy)
        self._origin: HostCopy | None = None
        self._weights = FaultyWeights(
            self._layout,
            self._tensors,
            self._score,
            self._policy.config,
            transport=recipe.transport.name,
            device=self._policy.device,
            timeout_s=generation.dynamo_cfg.control_timeout_s,
            proof=recipe.proof,
        )
        if recipe.faults.pause_send_version is not None:
            self._weights.fault = SendFault(
                "pause", recipe.faults.pause_send_after, recipe.faults.pause_send_version, recipe.faults.pause_send_s
            )

    def ready(self) -> int:
        """Number of parameters; answers once the model is loaded."""
        return sum(tensor.numel() for _, tensor in self._policy.named_tensors())

    def foresee(self, prompt: Sequence[int]) -> None:
        """Score this prompt's tokens, now and whenever the weights change: a probe with it is answered from that."""
        self._foreseen.prompt = tuple(prompt)
        self._foreseen.look(self._version)

    def keep(self) -> None:
        """Begin to copy the weights to the host: what a failed update goes back to. Returns before they are there.

        The version before, of which the copy was, can then be sent no more.
        """
        if self._kept == self._version:
            return
        self._kept = self._version
        self._copy.begin()

    def own_logprobs(self, samples: list[Sample], version: int) -> tuple[list[list[float]], Flips]:
        """Log-probs of samples that `version` made, by its weights, and the flips among them. Raises RefitError for a
        version that is not held any more."""
        batch, flips = collate(samples), Flips()
        with self._policy.holding(self._held(version)):
            found = self._policy.logprobs(batch, flips=flips)
        return [row[mask].tolist() for row, mask in zip(found, batch.mask, strict=True)], flips

    def train(self, samples: list[Sample], version: int, flips: Flips | None = None) -> dict[str, float]:
        """One optimizer step, which makes `version`; the weights before it are kept on the host. flips: of the samples
        that an older version made."""
        figures = self._await_copy()
        metrics = self._policy.train_step(collate(samples), self._loss, flips)
        self._become(version)
        return metrics | figures

    def save(self, folder: Path, info: TrainingInfo) -> int:
        """Write a checkpoint of what the policy has now; returns its bytes. Raises RefitError when that is another
        version than `info.step`."""
        if self._version != info.step:
            raise RefitError(f"the trainer has policy version {self._version}, not {info.step}")
        weights, state = self._policy.checkpoint()
        whole = info.model_copy(update={"optimizer_steps": self._policy.steps})
        return write_checkpoint(folder, whole, weights, state if self._saves_optimizer else {})

    def agreement(self, most: int) -> dict[str, list[float]]:
        """Log-probs of the last step's tokens before it, `trainer` and `engine`: at most so many, evenly spaced."""
        trainer, engine = self._policy.last_scored
        step = max(1, -(-len(trainer) // most))
        return {"trainer": trainer[::step].tolist(), "engine": engine[::step].tolist()}

    def go_back(self, version: int) -> None:
        """Undo the last step. Raises RefitError unless the copy on the host is of `version`."""
        if self._kept != version:
            raise RefitError(f"no snapshot of policy version {version}")
        self._policy.steps -= 1
        self._policy.restore(self._copy.tensors)
        self._become(version)

    def start_over(self, version: int) -> None:
        """Make `version` of the first weights, as they were when this was called first, with a fresh optimizer."""
        self._await_copy()
        first = self._first_weights()
        self._policy.steps = 0
        self._policy.restore(first)
        self._become(version)

    def nudge(self, version: int) -> dict[str, float]:
        """Make `version` without samples, of the first weights and noise: for fault tests, which need a difference.

        Returns the seconds that the snapshot was waited for, and that scoring what a probe may sample took.
        """
        figures = self._await_copy()
        device = self._policy.device
        generator = torch.Generator(device).manual_seed(version)
        moved = {}
        for name, tensor in self._first_weights().items():
            own = tensor.to(device).float()
            noise = torch.randn(own.shape, generator=generator, device=device)
            spread = own.std() if own.std() > 0 else own.abs().mean()  # norms begin as ones
            moved[name] = (own + NUDGE * spread * noise).to(tensor.dtype)
        self._policy.restore(moved)
        return {"snapshot_s": figures["snapshot_s"], "foresee_s": self._become(version)}

    def score_nudged(self, prompts: Sequence[Sequence[int]], size: float, seed: int) -> list[list[float]]:
        """Log-probs of each prompt's tokens but the first, under weights moved by noise of `size` standard deviations
        of each tensor; the policy keeps its own."""
        moved = copy.copy(self._policy)
        moved.model = copy.deepcopy(self._policy.model)
        generator = torch.Generator(self._policy.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                parameter += (size * parameter.float().std() * noise).to(parameter.dtype)
        return [moved.prompt_logprobs(prompt).tolist() for prompt in prompts]

    def set_fault(self, fault: SendFault | None) -> None:
        """What goes wrong in the sends to come."""
        self._weights.fault = fault

    def pid(self) -> int:
        return os.getpid()

    def weights(self, method: str, *arguments: Any) -> Any:
        """Call a method of the weight source."""
        return getattr(self._weights, method)(*arguments)

    def _await_copy(self) -> dict[str, float]:
        """The seconds it was waited for, and its size in bytes."""
        began = time.monotonic()
        self.keep()
        self._copy.wait()
        return {"snapshot_s": time.monotonic() - began, "snapshot_bytes": float(self._copy.nbytes)}

    def _first_weights(self) -> Mapping[str, torch.Tensor]:
        """On the host, as they were when this was called first."""
        if self._origin is None:
            self._origin = HostCopy(self._policy.weights)
            self._origin.begin()
            self._origin.wait()
        return self._origin.tensors

    def _become(self, version: int) -> float:
        """The policy has `version` now; returns the seconds that looking ahead took."""
        self._version = version
        began = time.monotonic()
        self._foreseen.look(version)
        return time.monotonic() - began

    def _layout(self, version: int) -> list[Slot]:
        return [Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._checkpoint(version).items()]

    def _tensors(self, version: int) -> NamedTensors:
        return ((name, tensor.detach().contiguous()) for name, tensor in self._checkpoint(version).items())

    def _checkpoint(self, version: int) -> Mapping[str, torch.Tensor]:
        return self._policy.form.of(self._held(version))

    def _held(self, version: int) -> Mapping[str, torch.Tensor]:
        """The model's parameters. Raises RefitError for a version that is neither the policy's nor the snapshot's."""
        if version == self._version:
            return self._policy.weights
        if version == self._kept:
            return self._copy.tensors
        raise RefitError(f"the trainer holds no weights of policy version {version}")

    def _score(self, version: int, prompt: Sequence[int]) -> ProbeScore:
        current = self._scores(self._version, prompt)
        if self._kept is None or self._kept == self._version:
            return ProbeScore(current, None)
        previous = self._scores(self._kept, prompt)
        return ProbeScore(current, previous) if version == self._version else ProbeScore(previous, current)

    def _scores(self, version: int, prompt: Sequence[int]) -> list[float]:
        """Under a version that is held. Of what was not foreseen, under the version before, its weights take the
        place of the model's own meanwhile."""
        foreseen = self._foreseen.scores(version, prompt)
        if foreseen is not None:
            return foreseen
        if version == self._version:
            return tolist(self._policy.prompt_logprobs(prompt))
        with self._policy.holding(self._held(version)):
            return tolist(self._policy.prompt_logprobs(prompt))


def tolist(scores: torch.Tensor) -> list[float]:
    found: list[float] = scores.tolist()
    return found


class Foreseen:
    """Log-probs of a prompt's tokens, of the two versions last looked at."""

    def __init__(self, policy: Policy) -> None:
        self.prompt: tuple[int, ...] = ()
        self._policy = policy
        self._scores: dict[int, list[float]] = {}

    def look(self, version: int) -> None:
        """At what the policy has now, which is `version`."""
        self._scores.pop(version, None)
        if self.prompt:
            self._scores = dict([*self._scores.items()][-1:])
            self._scores[version] = tolist(self._policy.prompt_logprobs(self.prompt))

    def scores(self, version: int, prompt: Sequence[int]) -> list[float] | None:
        """Of the prompt's tokens but the first; None where this version or this prompt was not looked at."""
        return self._scores.get(version) if tuple(prompt) == self.prompt else None


class RemoteWeights:
    """A `WeightSource` whose every call runs in the trainer actor; its failures become RefitError, its end
    SourceLostError."""

    def __init__(self, trainer: Any, timeout_s: float) -> None:
        self._trainer = trainer
        self._timeout_s = timeout_s

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
        try:
            return ray.get(self._trainer.weights.remote(method, *arguments), timeout=self._timeout_s + GRACE_S)
        except RayTaskError as error:
            cause = error.cause or error
            raise RefitError(f"trainer: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}") from error
        except RayActorError as error:
            raise SourceLostError(f"trainer: its process is gone ({type(error).__name__})") from error
        except RayError as error:
            raise RefitError(f"trainer: {method}: {' '.join(str(error).split())[:300]}") from error

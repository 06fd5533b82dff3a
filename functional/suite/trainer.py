"""The trainer as a Ray actor on its own device, and the adapter through which a refit drives it."""

import copy
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from functional.engine.wire import Manifest, Slot
from functional.runtime.errors import RefitError
from functional.runtime.recipe.environment import SHARED_GPU
from functional.runtime.recipe.model import Recipe
from functional.runtime.refit.names import NamedTensors, Proof
from functional.runtime.refit.parts import SourceLostError
from functional.runtime.refit.probe import ProbeScore
from functional.runtime.rollout.completion import Completion
from functional.suite.policy import Policy, Sample, collate
from functional.suite.send_faults import FaultyWeights, SendFault

NUDGE = 0.15
"""Noise of `Trainer.nudge`, in standard deviations of the tensor it is added to."""
GRACE_S = 30.0
"""How much longer than the actor's own deadlines a call to it may take."""


@dataclass(frozen=True)
class Snapshot:
    """Weights before a step, in host memory: what a failed update goes back to."""

    version: int
    weights: dict[str, torch.Tensor]


@ray.remote(num_cpus=0, num_gpus=1, max_restarts=0, max_concurrency=4)
class Trainer:
    """Holds the policy. Several calls may run at once, so that `abort` reaches a blocked `send`."""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        policy, generation = recipe.policy, recipe.policy.generation
        if recipe.cluster.share_gpu:
            os.environ.update(SHARED_GPU)
        self._loss = recipe.loss_fn
        self._policy = Policy(
            model_dir,
            recipe.cluster.device,
            lr=policy.optimizer.lr,
            optimizer=policy.optimizer.name,
            weight_decay=policy.optimizer.weight_decay,
            max_grad_norm=policy.max_grad_norm,
            temperature=generation.temperature,
            micro_batch_size=policy.micro_batch_size,
            keep_reference=recipe.loss_fn.reference_policy_kl_penalty > 0,
            seed=recipe.grpo.seed,
        )
        self._version = 0
        self._snapshot: Snapshot | None = None
        self._origin: dict[str, torch.Tensor] = {}
        self._weights = FaultyWeights(
            self._layout,
            self._tensors,
            self._score,
            self._policy.config,
            transport=recipe.transport.name,
            device=self._policy.device,
            timeout_s=generation.dynamo_cfg.control_timeout_s,
        )
        if recipe.faults.pause_send_version is not None:
            self._weights.fault = SendFault(
                "pause", recipe.faults.pause_send_after, recipe.faults.pause_send_version, recipe.faults.pause_send_s
            )

    def ready(self) -> int:
        """Number of parameters; answers once the model is loaded."""
        return sum(tensor.numel() for _, tensor in self._policy.named_tensors())

    def train(self, samples: list[Sample], version: int) -> dict[str, float]:
        """One optimizer step, which makes `version`; the weights before it are kept on the host."""
        figures = self._keep_snapshot(version)
        return self._policy.train_step(collate(samples), self._loss) | figures

    def go_back(self, version: int) -> None:
        """Undo the last step. Raises RefitError unless the snapshot is of `version`."""
        if self._snapshot is None or self._snapshot.version != version:
            raise RefitError(f"no snapshot of policy version {version}")
        self._policy.restore(self._snapshot.weights)
        self._version, self._snapshot = version, None

    def nudge(self, version: int) -> None:
        """Make `version` without samples, of the first weights and noise: for fault tests, which need a difference."""
        self._keep_snapshot(version)
        self._origin = self._origin or self._policy.snapshot()
        generator = torch.Generator().manual_seed(version)
        moved = {}
        for name, tensor in self._origin.items():
            host = tensor.float()
            moved[name] = host + NUDGE * host.std() * torch.randn(host.shape, generator=generator)
        self._policy.restore(moved)

    def score_nudged(self, completions: Sequence[Completion], size: float, seed: int) -> list[float]:
        """Log-probs of the completions' tokens under weights moved by noise of `size` standard deviations of each
        tensor; the policy keeps its own."""
        moved = copy.copy(self._policy)
        moved.model = copy.deepcopy(self._policy.model)
        generator = torch.Generator(self._policy.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                parameter += (size * parameter.float().std() * noise).to(parameter.dtype)
        return self._logprobs(moved, as_samples(completions))

    def set_fault(self, fault: SendFault | None) -> None:
        """What goes wrong in the sends to come."""
        self._weights.fault = fault

    def pid(self) -> int:
        return os.getpid()

    def weights(self, method: str, *arguments: Any) -> Any:
        """Call a method of the weight source."""
        return getattr(self._weights, method)(*arguments)

    def _keep_snapshot(self, version: int) -> dict[str, float]:
        began = time.monotonic()
        self._snapshot = Snapshot(self._version, self._policy.snapshot())
        seconds = time.monotonic() - began
        self._version = version
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._snapshot.weights.values())
        return {"snapshot_s": seconds, "snapshot_bytes": float(size)}

    def _layout(self, version: int) -> list[Slot]:
        return [Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._held(version).items()]

    def _tensors(self, version: int) -> NamedTensors:
        return ((name, tensor.detach().contiguous()) for name, tensor in self._held(version).items())

    def _held(self, version: int) -> Mapping[str, torch.Tensor]:
        """Raises RefitError for a version that is neither the policy's nor the snapshot's."""
        if version == self._version:
            return self._policy.weights
        if self._snapshot is not None and version == self._snapshot.version:
            return self._snapshot.weights
        raise RefitError(f"the trainer holds no weights of policy version {version}")

    def _score(self, version: int, completions: Sequence[Completion]) -> ProbeScore:
        samples = as_samples(completions)
        current = self._logprobs(self._policy, samples)
        if self._snapshot is None:
            return ProbeScore(current, None)
        before = copy.copy(self._policy)
        before.model = copy.deepcopy(self._policy.model)
        with torch.no_grad():
            for name, parameter in before.model.named_parameters():
                parameter.copy_(self._snapshot.weights[name])
        previous = self._logprobs(before, samples)
        return ProbeScore(current, previous) if version == self._version else ProbeScore(previous, current)

    def _logprobs(self, policy: Policy, samples: list[Sample]) -> list[float]:
        """Of every completion token, sample after sample."""
        batch = collate(samples)
        scored: list[float] = policy.logprobs(batch)[batch.mask].tolist()
        return scored


def as_samples(completions: Sequence[Completion]) -> list[Sample]:
    return [Sample(c.prompt_token_ids, c.token_ids, c.logprobs) for c in completions]


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

    def send(self, version: int) -> Proof:
        proof: Proof = self._ask("send", version, deadlines=2)
        return proof

    def proof(self, version: int) -> Proof:
        proof: Proof = self._ask("proof", version)
        return proof

    def abort(self, reason: str) -> None:
        self._ask("abort", reason)

    def score(self, version: int, completions: Sequence[Completion]) -> ProbeScore:
        score: ProbeScore = self._ask("score", version, completions)
        return score

    def _ask(self, method: str, *arguments: Any, deadlines: int = 1) -> Any:
        """`deadlines`: how many of the actor's own lie within the call; they come first."""
        patience_s = deadlines * self._timeout_s + GRACE_S
        try:
            return ray.get(self._trainer.weights.remote(method, *arguments), timeout=patience_s)
        except RayTaskError as error:
            cause = error.cause or error
            raise RefitError(f"trainer: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}") from error
        except RayActorError as error:
            raise SourceLostError(f"trainer: its process is gone ({type(error).__name__})") from error
        except RayError as error:
            raise RefitError(f"trainer: {method}: {' '.join(str(error).split())[:300]}") from error

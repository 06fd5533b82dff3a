"""What each rank of the trainer holds and does: the policy, its snapshot, and what a probe may sample, foreseen.

Of a trainer of several ranks all call the same methods, with the same arguments, in the same order.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from functional.engine.wire import Slot
from functional.runtime.errors import RefitError
from functional.runtime.recipe.environment import SHARED_GPU
from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.placement import device_of
from functional.runtime.refit.gathered import GatheredWeights
from functional.suite.checkpoint import TrainingInfo, read_tensors, write_checkpoint
from functional.suite.host_copy import HostCopy
from functional.suite.policy import WHOLE, Policy, Sample, collate
from functional.suite.sampling_filter import Flips, SamplingFilter
from functional.suite.shards import Place, Shards

NUDGE = 0.15
"""Noise of `TrainerRank.nudge`, in standard deviations of the tensor it is added to."""


class TrainerRank:
    """One rank; most trainers have no other."""

    def __init__(
        self, recipe: Recipe, model_dir: Path, resumed: Path | None, place: Place, store: TCPStore | None = None
    ) -> None:
        """resumed: the checkpoint that the run goes on from. store: where several ranks meet."""
        policy, generation = recipe.policy, recipe.policy.generation
        if recipe.cluster.share_gpu:
            os.environ.update(SHARED_GPU | {"CUDA_VISIBLE_DEVICES": str(device_of(place.rank, place.gpus))})
        device = torch.device(recipe.cluster.device)
        self.shards = None if store is None else Shards(place, device, store)
        self.policy = Policy(
            model_dir,
            device,
            optimizer=policy.optimizer,
            scheduler=policy.scheduler,
            max_grad_norm=policy.max_grad_norm,
            temperature=generation.temperature,
            kept=WHOLE if recipe.faults.score_unfiltered else SamplingFilter(generation.top_k, generation.top_p),
            micro_batch_size=policy.micro_batch_size,
            keep_reference=recipe.loss_fn.reference_policy_kl_penalty > 0,
            seed=recipe.grpo.seed,
            shards=self.shards,
        )
        self.version = 0
        self.foreseen = Foreseen(self.policy)
        self._loss = recipe.loss_fn
        if resumed is not None:
            info = TrainingInfo.of(resumed)
            self.policy.resume(*read_tensors(resumed), info.optimizer_steps)
            self.version = info.step
        self._saves_optimizer = recipe.checkpointing.save_optimizer
        self._copy = HostCopy(self.policy.weights)
        self.kept: int | None = None
        self._origin: HostCopy | None = None
        self._slots: list[Slot] | None = None
        self._to_gather = 0
        self._gathered = GatheredWeights(self._divided_weights)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.policy.parameters.values())

    @property
    def passes(self) -> int:
        """How often all weights were gathered."""
        return self._gathered.passes

    def foresee(self, prompt: Sequence[int]) -> None:
        """Score this prompt's tokens, now and whenever the weights change."""
        self.foreseen.prompt = tuple(prompt)
        self.foreseen.look(self.version)

    def keep(self) -> None:
        """Begin to copy the weights to the host: what a failed update goes back to. Returns before they are there.

        The version before, of which the copy was, can then be sent no more.
        """
        if self.kept == self.version:
            return
        self.kept = self.version
        self._copy.begin()

    def own_logprobs(self, samples: list[Sample], version: int) -> tuple[list[list[float]], Flips]:
        """Log-probs of samples that `version` made, by its weights, and the flips among them. Raises RefitError for a
        version that is not held any more."""
        batch, flips = collate(samples), Flips()
        with self.policy.holding(self._held(version)):
            found = self.policy.logprobs(batch, flips=flips)
        return [row[mask].tolist() for row, mask in zip(found, batch.mask, strict=True)], flips

    def train(self, samples: list[Sample], version: int, flips: Flips | None = None) -> dict[str, float]:
        """One optimizer step, which makes `version`; the weights before it are kept on the host. flips: of the samples
        that an older version made."""
        figures = self._await_copy()
        metrics = self.policy.train_step(collate(samples), self._loss, flips)
        self._become(version)
        return metrics | figures

    def save(self, folder: Path, info: TrainingInfo) -> int:
        """Write a checkpoint of what the policy has now; returns its bytes, 0 where another rank writes it. Raises
        RefitError when that is another version than `info.step`."""
        if self.version != info.step:
            raise RefitError(f"the trainer has policy version {self.version}, not {info.step}")
        weights, state = self.policy.checkpoint()
        if self.shards is not None and not self.shards.leads:
            return 0
        whole = info.model_copy(update={"optimizer_steps": self.policy.steps})
        return write_checkpoint(folder, whole, weights, state if self._saves_optimizer else {})

    def agreement(self, most: int) -> dict[str, list[float]]:
        """Log-probs of the last step's tokens before it, `trainer` and `engine`: at most so many, evenly spaced."""
        trainer, engine = self.policy.last_scored
        step = max(1, -(-len(trainer) // most))
        return {"trainer": trainer[::step].tolist(), "engine": engine[::step].tolist()}

    def go_back(self, version: int) -> None:
        """Undo the last step. Raises RefitError unless the copy on the host is of `version`."""
        if self.kept != version:
            raise RefitError(f"no snapshot of policy version {version}")
        self.policy.steps -= 1
        self.policy.restore(self._copy.tensors)
        self._become(version)

    def start_over(self, version: int) -> None:
        """Make `version` of the first weights, as they were when this was called first, with a fresh optimizer."""
        self._await_copy()
        first = self._first_weights()
        self.policy.steps = 0
        self.policy.restore(first)
        self._become(version)

    def nudge(self, version: int) -> dict[str, float]:
        """Make `version` without samples, of the first weights and noise: for fault tests, which need a difference.

        Returns the seconds that the snapshot was waited for, and that scoring what a probe may sample took.
        """
        figures = self._await_copy()
        device = self.policy.device
        generator = torch.Generator(device).manual_seed(version)
        moved = {}
        for name, tensor in self._first_weights().items():
            own = tensor.to(device).float()
            noise = torch.randn(own.shape, generator=generator, device=device)
            spread = own.std() if own.numel() > 1 and own.std() > 0 else own.abs().mean()  # norms begin as ones
            moved[name] = (own + NUDGE * spread * noise).to(tensor.dtype)
        self.policy.restore(moved)
        return {"snapshot_s": figures["snapshot_s"], "foresee_s": self._become(version)}

    def score_nudged(self, prompts: Sequence[Sequence[int]], size: float, seed: int) -> list[list[float]]:
        """Log-probs of each prompt's tokens but the first, under weights moved by noise of `size` standard deviations
        of each tensor; the policy keeps its own. The first rank has them."""
        moved = self.policy.copied(torch.bfloat16)
        if moved is None:
            return []
        generator = torch.Generator(self.policy.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                parameter += (size * parameter.float().std() * noise).to(parameter.dtype)
        return [tolist(self.policy.prompt_logprobs(prompt, moved)) for prompt in prompts]

    def score(self, version: int, prompt: Sequence[int]) -> list[float]:
        """Log-probs of the prompt's tokens but the first under a version that is held: for any but the policy's, its
        weights take the place of the model's own meanwhile."""
        if version == self.version:
            return tolist(self.policy.prompt_logprobs(prompt))
        with self.policy.holding(self._held(version)):
            return tolist(self.policy.prompt_logprobs(prompt))

    def layout(self, version: int) -> list[Slot]:
        """Checkpoint name, dtype and shape of each weight, without a tensor. Raises RefitError for a version that is
        not held."""
        self._held(version)
        if self._slots is None:
            parameters = self.policy.parameters.items()
            shapes = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in parameters}
            views = self.policy.form.of(shapes)
            self._slots = [Slot(name, view.dtype, tuple(view.shape)) for name, view in views.items()]
        return self._slots

    def tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint name and tensor of each weight. Of several ranks the first has this, while the others `follow`."""
        if self.shards is None:
            return self.policy.form.each(self._held(version).items())
        return self._gathered_tensors(version)

    def _gathered_tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        self._to_gather = version
        weights = self._gathered.weights()
        try:
            yield from self.policy.form.each(weights)
        finally:
            weights.close()
            self._gathered.release()

    def follow(self, version: int) -> None:
        """On the other ranks: gather what the first one goes through in `tensors`."""
        self._to_gather = version
        self._gathered.follow()

    def _divided_weights(self) -> Iterator[tuple[str, Tensor]]:
        assert self.shards is not None
        for name, part in self._held(self._to_gather).items():
            yield name, self.shards.as_divided(self.policy.parameters[name], part)

    def _await_copy(self) -> dict[str, float]:
        """The seconds it was waited for, and its size in bytes."""
        began = time.monotonic()
        self.keep()
        self._copy.wait()
        return {"snapshot_s": time.monotonic() - began, "snapshot_bytes": float(self._copy.nbytes)}

    def _first_weights(self) -> Mapping[str, Tensor]:
        """On the host, as they were when this was called first."""
        if self._origin is None:
            self._origin = HostCopy(self.policy.weights)
            self._origin.begin()
            self._origin.wait()
        return self._origin.tensors

    def _become(self, version: int) -> float:
        """The policy has `version` now; returns the seconds that looking ahead took."""
        self.version = version
        began = time.monotonic()
        self.foreseen.look(version)
        return time.monotonic() - began

    def _held(self, version: int) -> Mapping[str, Tensor]:
        """By the model's own names, this rank's part of each. Raises RefitError for a version that is neither the
        policy's nor the snapshot's."""
        if version == self.version:
            return self.policy.weights
        if version == self.kept:
            return self._copy.tensors
        raise RefitError(f"the trainer holds no weights of policy version {version}")


def tolist(scores: Tensor) -> list[float]:
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

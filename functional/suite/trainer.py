"""The trainer as a Ray actor on its own device, and the adapter through which a refit drives it."""

import copy
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from functional.runtime.config import Recipe
from functional.runtime.errors import RefitError
from functional.runtime.proof import expected_proof
from functional.runtime.refit import ProbeScore
from functional.runtime.rollout import Completion
from functional.runtime.sender import Sender, make_sender, update_info
from functional.runtime.worker_args import SHARED_GPU
from functional.suite.grpo import LossConfig
from functional.suite.policy import Policy, Sample, collate

TRANSPORT = {"cpu": "gloo", "cuda": "nccl"}


@ray.remote(num_cpus=0, num_gpus=1, max_restarts=0, max_concurrency=4)
class Trainer:
    """Holds the policy. Several calls may run at once, so that `abort` reaches a blocked `send`."""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        policy, generation = recipe.policy, recipe.policy.generation
        self._device = recipe.cluster.device
        self._faults = recipe.faults
        self._sends = 0
        if recipe.cluster.share_gpu:
            os.environ.update(SHARED_GPU)
        self._timeout_s = generation.dynamo_cfg.control_timeout_s
        self._loss = LossConfig(**recipe.loss_fn.model_dump())
        self._policy = Policy(
            model_dir,
            self._device,
            lr=policy.optimizer.lr,
            optimizer=policy.optimizer.name,
            weight_decay=policy.optimizer.weight_decay,
            max_grad_norm=policy.max_grad_norm,
            temperature=generation.temperature,
            micro_batch_size=policy.micro_batch_size,
            keep_reference=recipe.loss_fn.reference_policy_kl_penalty > 0,
            seed=recipe.grpo.seed,
        )
        self._previous: dict[str, torch.Tensor] | None = None
        self._sender: Sender | None = None

    def ready(self) -> int:
        """Number of parameters; answers once the model is loaded."""
        return sum(tensor.numel() for _, tensor in self._policy.named_tensors())

    def train(self, samples: list[Sample]) -> dict[str, float]:
        """One optimizer step; the weights before it stay as the previous version."""
        self._previous = self._policy.snapshot()
        return self._policy.train_step(collate(samples), self._loss)

    def score(self, sample: Sample) -> ProbeScore:
        """Log-probs of one sample under the current and the previous weights."""
        return ProbeScore(self._logprobs(sample), self._previous_logprobs(sample))

    def _logprobs(self, sample: Sample) -> list[float]:
        scored: list[float] = self._policy.logprobs(collate([sample]))[0].tolist()
        return scored

    def _previous_logprobs(self, sample: Sample) -> list[float] | None:
        if self._previous is None:
            return None
        policy = copy.copy(self._policy)
        policy.model = copy.deepcopy(self._policy.model)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.copy_(self._previous[name])
        scored: list[float] = policy.logprobs(collate([sample]))[0].tolist()
        return scored

    def update_info(self) -> dict[str, Any]:
        tensors = list(self._policy.named_tensors())
        return update_info(tensors) | {"total_bytes": sum(t.numel() * t.element_size() for _, t in tensors)}

    def expected_proof(self) -> dict[str, Any]:
        return expected_proof(self._policy.named_tensors(), self._policy.config)

    def listen(self, address: str) -> int:
        if self._sender is not None:
            self._sender.close()
        self._sender = make_sender(TRANSPORT[self._device], self._policy.device, self._timeout_s)
        return self._sender.listen(address)

    def connect(self, address: str, port: int, world_size: int) -> None:
        self._connected().connect(address, port, world_size)

    def send(self) -> dict[str, float]:
        info = update_info(self._policy.named_tensors())
        return asdict(self._connected().send(self._named(), info=info))

    def abort(self, reason: str) -> None:
        if self._sender is not None:
            self._sender.abort(reason)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _connected(self) -> Sender:
        if self._sender is None:
            raise RefitError("trainer: no transfer group, call listen first")
        return self._sender

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        version, self._sends = self._sends, self._sends + 1
        for index, named in enumerate(self._policy.named_tensors()):
            if version == self._faults.pause_send_version and index == self._faults.pause_send_after:
                time.sleep(self._faults.pause_send_s)
            yield named


class RemoteWeights:
    """A `WeightSource` whose every call runs in the trainer actor; its failures become RefitError."""

    def __init__(self, trainer: Any, timeout_s: float) -> None:
        self._trainer = trainer
        self._timeout_s = timeout_s + 30  # the actor's own deadlines come first

    def listen(self, address: str) -> int:
        port: int = self._ask(self._trainer.listen.remote(address))
        return port

    def connect(self, address: str, port: int, world_size: int) -> None:
        self._ask(self._trainer.connect.remote(address, port, world_size))

    def update_info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._ask(self._trainer.update_info.remote())
        return info

    def expected_proof(self) -> dict[str, Any]:
        proof: dict[str, Any] = self._ask(self._trainer.expected_proof.remote())
        return proof

    def send(self) -> None:
        self._ask(self._trainer.send.remote())

    def abort(self, reason: str) -> None:
        self._ask(self._trainer.abort.remote(reason))

    def score(self, completion: Completion) -> ProbeScore:
        sample = Sample(completion.prompt_token_ids, completion.token_ids, completion.logprobs)
        score: ProbeScore = self._ask(self._trainer.score.remote(sample))
        return score

    def _ask(self, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=self._timeout_s)
        except RayTaskError as error:
            cause = error.cause or error
            raise RefitError(f"trainer: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}") from error
        except RayError as error:
            raise RefitError(f"trainer: {' '.join(str(error).split())[:300]}") from error

"""The worker extension: what a trainer can ask of a worker beside vLLM's own weight-update calls.

Reached through Dynamo's `update_weights_from_distributed` with `engine_rpc` set to a method's name. The route drops
what a method returns, so every check here answers by raising.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from functional.engine import cpu_proof, nh
from functional.engine.plan import Learned
from functional.engine.planned import buffers_of, learn_plan
from functional.engine.proof import EngineProof, Proof, TensorProof, differences, prove_all, refuse
from functional.engine.transports import PROOF_VARIABLE
from functional.engine.wire import Manifest

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.config.parallel import ParallelConfig


class WorkerExtension:
    """Mixed into vLLM's worker (`--worker-extension-cls functional.engine.extension.WorkerExtension`)."""

    if TYPE_CHECKING:
        device: torch.device
        model_config: ModelConfig
        model_runner: Any
        parallel_config: ParallelConfig
        weight_transfer_engine: Any
        _weight_update_active: bool
        _is_checkpoint_format: bool
        _loaded_buffers: Proof
        _learned: tuple[str, Learned]

    def reset_reload(self) -> None:
        """Bring the worker to where an update can start, whatever became of the last one. Called before every start.

        A failed update leaves vLLM's layerwise reload half begun; starting again on top of it would leave memory
        uninitialised. Weights are undefined until the update that follows has sent all of them.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._weight_update_active = False
        with torch.device(self.device):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
        _remember_buffers(self)
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.received.clear()

    def prove_weights(self, expected: dict[str, Any]) -> None:
        """Raise ValueError unless the resident weights are, byte for byte, the expected ones.

        `expected`: `EngineProof.as_dict`, of which this rank takes its own part: each parameter under its name in
        vLLM's model (`functional.runtime.refit.expected`). Every parameter of the model must be named, and no other.
        """
        rank, world_size = self.parallel_config.rank, self.parallel_config.world_size
        claimed = EngineProof.parse(expected).of_rank(rank, world_size)
        model = self.model_runner.model
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        _remember_buffers(self)
        problems = differences(claimed.tensors, _parameter_proofs(model, claimed.key))
        problems += _packing_problems(model, claimed)
        loaded = self._loaded_buffers
        problems += differences(loaded.tensors, _buffer_proofs(model, loaded.key))
        problems += _received_twice(self.weight_transfer_engine)
        refuse(problems, len(claimed.tensors), f"rank {rank}: " if world_size > 1 else "")

    def learn_plan(self, timeout_s: float) -> None:
        """Learn how the sender's tensors become this rank's parameters, tell it, and agree on how updates are made.

        Called once a transfer group, before its first update; weights may be random afterwards.
        """
        self.reset_reload()

        def learn(manifest: Manifest) -> Learned:
            known = getattr(self, "_learned", None)
            if known is None or known[0] != manifest.digest():
                learned = learn_plan(self.model_runner.model, self.model_config, manifest, self.device)
                known = self._learned = manifest.digest(), learned
            return known[1]

        self.weight_transfer_engine.agree(learn, self._loaded_buffers, timeout_s)

    def update_by_plan(self, timeout_s: float) -> None:
        """Receive all weights into the parameters and prove them, with the sender and the other ranks.

        Raises ValueError on all ranks unless each holds, byte for byte, what the sender has.
        """
        refuse(*self.weight_transfer_engine.update_by_plan(timeout_s))

    def prove_by_plan(self, timeout_s: float) -> None:
        """The proof alone, of what is held now. Raises as `update_by_plan` does."""
        refuse(*self.weight_transfer_engine.prove_by_plan(timeout_s))

    def exchange_bytes(self, update_info: dict[str, Any]) -> None:
        """Receive as many bytes as the update would have, and leave the weights alone: for benchmarks."""
        engine = self.weight_transfer_engine
        engine.exchange(engine.parse_update_info(update_info))

    def commit_version(self) -> None:
        """Do nothing: the call that carries the new `weight_version` to the route once the proof is given."""


def _remember_buffers(worker: WorkerExtension) -> None:
    """Buffers (rotary tables, scales) are no part of a checkpoint: a refit must leave them as they were loaded.

    Both hashes are made here; their key is told to nobody.
    """
    if not hasattr(worker, "_loaded_buffers"):
        on_device = worker.device.type == "cuda" and os.environ.get(PROOF_VARIABLE) != "sha256"
        key = nh.Key.draw() if on_device else None
        worker._loaded_buffers = Proof(key, _buffer_proofs(worker.model_runner.model, key))


def _parameter_proofs(model: nn.Module, key: nh.Key | None) -> dict[str, TensorProof]:
    """Proof of each parameter, under its first name when several modules share it; vocabulary padding included."""
    resident: list[tuple[str, list[Tensor]]] = []
    packed: dict[str, tuple[nn.Module, str]] = {}
    for name, layer, parameter in _parameters(model):
        attribute = name.rpartition(".")[2]
        if parameter.numel() == 0 or cpu_proof.is_packed_over(layer, attribute):
            packed[name] = layer, attribute
        else:
            resident.append((name, [parameter]))
    proofs = cpu_proof.packed_proofs(packed, key)
    if missing := packed.keys() - proofs.keys():
        raise RuntimeError(
            f"{min(missing)} is packed and was not hashed: is the dynamo_rl_engine plugin loaded (VLLM_PLUGINS)?"
        )
    return proofs | prove_all(resident, key)


def _parameters(model: nn.Module) -> list[tuple[str, nn.Module, Tensor]]:
    modules = dict(model.named_modules())
    found: list[tuple[str, nn.Module, Tensor]] = []
    for name, parameter in model.named_parameters():
        found.append((name, modules[name.rpartition(".")[0]], parameter))
    return found


def _packing_problems(model: nn.Module, claimed: Proof) -> list[str]:
    """Layers that compute with a packed copy of a weight that is also resident, maybe under another layer's name.

    vLLM 0.23.0 needs this: where embeddings are tied by sharing the parameter (Llama, not Qwen3), its reload packs the
    embedding anew and leaves the head's packed copy as it was.
    """
    names = {id(parameter): name for name, _, parameter in _parameters(model)}
    doubled: dict[str, tuple[nn.Module, str]] = {}
    wanted: dict[str, str] = {}
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        name = names.get(id(weight), "")
        if isinstance(weight, Tensor) and weight.numel() and name in claimed.tensors:
            doubled[path], wanted[path] = (layer, "weight"), claimed.tensors[name].digest
    return [
        f"{path}: its packed weight differs, hash {packed.digest[:12]}, expected {wanted[path][:12]}"
        for path, packed in cpu_proof.packed_proofs(doubled, claimed.key).items()
        if packed.digest != wanted[path]
    ]


def _buffer_proofs(model: nn.Module, key: nh.Key | None) -> dict[str, TensorProof]:
    return prove_all(((name, [buffer]) for name, buffer in buffers_of(model).items()), key)


def _received_twice(engine: Any) -> list[str]:
    received = getattr(engine, "received", {})
    return [f"{name}: received {count} times in one update" for name, count in received.items() if count > 1]

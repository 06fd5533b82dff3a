"""An engine rank that takes its updates by plan: what it has agreed to with the sender, and how it carries that out."""

from typing import Any

import torch
from torch import Tensor, nn

from functional.engine import cpu_proof
from functional.engine.group import Group
from functional.engine.plan import Learned, PlanRefused
from functional.engine.plan_check import PACKED, check_plan
from functional.engine.plan_copy import Spreader, make_buffers
from functional.engine.plan_proof import RankProof
from functional.engine.plan_trace import Places, trace_plan
from functional.engine.plan_wire import Agreed, prove_rank, receive_planned
from functional.engine.proof import Proof
from functional.engine.wire import Manifest


def learn_plan(model: nn.Module, model_config: Any, manifest: Manifest, device: torch.device) -> Learned:
    """The plan of this rank for a sender with this manifest, held against the loader. Weights are random afterwards,
    unless that shows before."""
    try:
        plan = trace_plan(model, manifest.slots)
    except PlanRefused as refused:
        return Learned(None, refused.problems)
    if packed := packed_weights(model):
        return Learned(plan, dict.fromkeys(packed, PACKED))
    try:
        return Learned(plan, check_plan(model, model_config, plan, manifest.slots, device))
    except PlanRefused as refused:
        return Learned(plan, refused.problems)
    except torch.OutOfMemoryError:
        largest = max(manifest.slots, key=lambda slot: slot.nbytes)
        return Learned(plan, {largest.name: "there is no memory left on the device to check the plan"})


def packed_weights(model: nn.Module) -> list[str]:
    """Names of the weights that layers hold in a packed form alone."""
    layers = dict(model.named_modules())
    names = []
    for name, tensor in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        if tensor.numel() == 0 or cpu_proof.is_packed_over(layers[path], attribute):
            names.append(name)
    return names


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """What the model holds beside parameters, as the proof names it."""
    return {f"buffer {name}": buffer for name, buffer in model.named_buffers() if buffer.numel()}


class PlannedRank:
    """Receives updates into the parameters of `model`, and proves what they hold."""

    def __init__(self, group: Group, model: nn.Module, agreed: Agreed, loaded: Proof) -> None:
        """loaded: the model's buffers, which no update may change."""
        plan, intake = agreed.plan, agreed.intake
        self._agreed = agreed
        self._group = group
        self._model = model
        tensors = Places.of(model).tensors
        self._where = {target.name: place(tensors[target.name]) for target in plan.targets}
        buffers = make_buffers(max((arrival.nbytes for arrival in intake.arrivals), default=0), group.device)
        self._spreader = Spreader(intake, tensors, buffers)
        self._proof = RankProof(plan, tensors, buffers_of(model), loaded, group.device)
        self._copies = len(plan.copies)

    def update(self, timeout_s: float) -> tuple[list[str], int]:
        """Receive and prove. Returns what is wrong with the weights of any rank, a line each, and how many copies this
        rank has proved.

        Raises as `receive_planned` does, and TransferError where the engine computes with other memory meanwhile.
        """
        problems = receive_planned(
            self._group, self._agreed, self._spreader, self._proof, timeout_s, self._check_places
        )
        return problems, self._copies

    def prove(self, timeout_s: float) -> tuple[list[str], int]:
        """Prove what is held now. Returns and raises as `update` does."""
        self._check_places()
        return prove_rank(self._group, self._agreed, self._proof, timeout_s), self._copies

    def _check_places(self) -> None:
        now = Places.of(self._model).tensors
        moved = [name for name, where in self._where.items() if name not in now or place(now[name]) != where]
        if moved:
            raise RuntimeError(f"{moved[0]}: the engine has moved it since the plan was agreed on")


def place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())

"""A model's parameters over the ranks of a trainer: FSDP2, and the few exchanges that the ranks need besides.

Each rank keeps a part of every parameter, cut along the first dimension, and has a share of every batch's samples. All
ranks do the same in the same order; every exchange has a deadline.
"""

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from functional.runtime.recipe.environment import LOOPBACK_INTERFACE

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class Place:
    """A rank's place in a trainer. timeout_s: of each exchange; startup_s: until all ranks are there.

    gpus: how many GPUs the ranks take turns on, where they share them with engines; 0 where each has its own.
    """

    rank: int = 0
    count: int = 1
    timeout_s: float = 600.0
    startup_s: float = 600.0
    gpus: int = 0


class Shards:
    """This rank's end of the trainer's group. Made by all ranks at once."""

    def __init__(self, place: Place, device: torch.device, store: TCPStore) -> None:
        """store: where the ranks meet, on their one node. Raises torch's RuntimeError when one does not come."""
        store.set(f"here/{place.rank}", "1")
        store.wait([f"here/{rank}" for rank in range(place.count)], timedelta(seconds=place.startup_s))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)  # else gloo goes by the name of the host
        dist.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=place.rank,
            world_size=place.count,
            timeout=timedelta(seconds=place.timeout_s),
            device_id=torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None,
        )
        self.rank = place.rank
        self.count = place.count
        self._device = device
        self._mesh: DeviceMesh = init_device_mesh(device.type, (place.count,))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def divide(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Leave this rank its parts of the parameters. `layers` are gathered one by one as `root` comes to them, what
        is in none of them with the root."""
        # Gradients are added up in float32, and given back after each pass: parts may change between any two.
        options: Any = {"mesh": self._mesh, "reshard_after_forward": True}
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in layers:
            fully_shard(layer, **options)
        fully_shard(root, **options)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """This rank's part of the sum of all ranks' gradients, in float32; taken away from the parameter."""
        gradient, parameter.grad = parameter.grad, None
        return None if gradient is None else part_of(gradient).float() * self.count  # FSDP2 gives the mean

    def whole(self, parameter: Tensor, part: Tensor) -> Tensor:
        """Of what this and the other ranks hold of something of the parameter's shape, all of it."""
        return self.as_divided(parameter, part).full_tensor()

    def as_divided(self, parameter: Tensor, part: Tensor) -> DTensor:
        """The same without an exchange, as what torch gathers when it is asked to."""
        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            part.to(self._device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that all have."""
        parts = whole.chunk(self.count)
        return parts[self.rank] if self.rank < len(parts) else whole[:0]

    def rows(self, count: int) -> tuple[int, int]:
        """First row of this rank's share of so many, and how many each rank takes: the last ranks may have rows past
        the end, so that all make as many passes."""
        each = -(-count // self.count)
        return self.rank * each, each

    def joined(self, rows: Tensor, count: int) -> Tensor:
        """All ranks' rows of equal number, in order, up to `count`."""
        found = [torch.empty_like(rows) for _ in range(self.count)]
        dist.all_gather(found, rows.contiguous())
        return torch.cat(found)[:count]

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, of each value."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Over all ranks, of each value."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: Any) -> Tensor:
        reduced = values.to(self._device, copy=True)
        dist.all_reduce(reduced, operation)
        return reduced


def part_of(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, without a copy: all of one that is not divided."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter


def emptied(model: nn.Module) -> nn.Module:
    """A copy of a model without its parameters' memory, for `filled`."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.new_empty(0), requires_grad=False) for p in model.parameters()}
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def filled(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of an emptied model that computes with these, which have its parameters' names."""
    made = copy.deepcopy(model)
    for name, parameter in made.named_parameters():
        parameter.data = weights[name]
    return made

"""vLLM's weight-transfer engines of this kit: gloo for CPU workers, NCCL for CUDA workers, with deadlines.

vLLM calls them inside the engine process; Dynamo's route holds the worker's pause lock around that call, with no
timeout of its own. So an engine returns an error at its deadline, whatever became of its peer.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from vllm.config.parallel import ParallelConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from functional.engine.gloo import GlooGroup
from functional.engine.group import Group, join_store, local_address
from functional.engine.nccl import NcclGroup
from functional.engine.plan import Learned
from functional.engine.plan_wire import join_agreement
from functional.engine.planned import PlannedRank
from functional.engine.proof import Proof
from functional.engine.transports import PROOF_VARIABLE
from functional.engine.wire import DEFAULT_BUFFER_BYTES, DEFAULT_TIMEOUT_S, Manifest, exchange, receive


@dataclass
class InitInfo(WeightTransferInitInfo):
    """vLLM's own four, and the deadline for forming the group (its transfers have the same unless they say other)."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """vLLM's own, as `functional.engine.wire.Manifest.info` gives them, and this transfer's deadline."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_kind != "dense":
            raise ValueError(f"update_kind {self.update_kind!r} is not supported, only 'dense'")
        self.manifest()

    def manifest(self) -> Manifest:
        return Manifest.from_info(self.names, self.dtype_names, self.shapes, self.packed, self.packed_buffer_size_bytes)


class DeadlineEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Joins a group of the trainer's, receives, and lets the group go at the first failure."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: WeightTransferConfig, parallel_config: ParallelConfig, model: torch.nn.Module) -> None:
        super().__init__(config, parallel_config, model)
        self.received: Counter[str] = Counter()
        """How often each tensor came since the last `reset_reload`; more than once is refused by the proof."""
        self._group: Group | None = None
        self._planned: PlannedRank | None = None
        self._timeout_s = DEFAULT_TIMEOUT_S

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        self._timeout_s = init_info.timeout_s
        store = join_store(init_info.master_address, init_info.master_port, init_info.timeout_s)
        group = self._new_group(store, init_info.rank_offset + worker_rank(self.parallel_config), init_info)
        group.form(init_info.timeout_s)
        self._group = group
        self._warm_up()

    def receive_weights(
        self, update_info: UpdateInfo, load_weights: Callable[[list[tuple[str, torch.Tensor]]], Any]
    ) -> None:
        self.received.update(update_info.names)
        with self._using_group() as group:
            receive(group, update_info.manifest(), load_weights, update_info.timeout_s or self._timeout_s)

    def exchange(self, update_info: UpdateInfo) -> None:
        """This engine's part of `wire.exchange`."""
        with self._using_group() as group:
            exchange(group, update_info.manifest(), update_info.timeout_s or self._timeout_s)

    def agree(self, learn: Callable[[Manifest], Learned], buffers: Proof, timeout_s: float) -> None:
        """Agree with the sender on what updates by plan carry, or that there will be none. learn: this rank's plan for
        what the sender has; buffers: as they were loaded."""
        self._planned = None
        with self._using_group() as group:
            agreed = join_agreement(group, learn, self.parallel_config.world_size, timeout_s)
            if agreed is not None:
                self._planned = PlannedRank(group, self.model, agreed, buffers)

    def update_by_plan(self, timeout_s: float) -> tuple[list[str], int]:
        """Receive and prove; returns as `PlannedRank.update` does."""
        with self._using_group():
            return self._agreed().update(timeout_s)

    def prove_by_plan(self, timeout_s: float) -> tuple[list[str], int]:
        """Returns as `PlannedRank.prove` does."""
        with self._using_group():
            return self._agreed().prove(timeout_s)

    def shutdown(self) -> None:
        self._planned = None
        if self._group is not None:
            self._group.close()
            self._group = None

    @contextlib.contextmanager
    def _using_group(self) -> Iterator[Group]:
        if self._group is None:
            raise RuntimeError(
                "no transfer group: call init_weight_transfer_engine first, and after every failed update"
            )
        try:
            yield self._group
        except BaseException:
            self._group = self._planned = None  # broken, and already released
            raise

    def _agreed(self) -> PlannedRank:
        if self._planned is None:
            raise RuntimeError("no plan was agreed on in this transfer group")
        return self._planned

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any] | Any) -> None:
        raise NotImplementedError("send with functional.runtime.refit.source")

    def _new_group(self, store: TCPStore, rank: int, info: InitInfo) -> Group:
        raise NotImplementedError

    def _warm_up(self) -> None:
        """What would make the first update slower than those that follow."""


class GlooEngine(DeadlineEngine):
    """Backend `gloo`."""

    def _new_group(self, store: TCPStore, rank: int, info: InitInfo) -> Group:
        return GlooGroup(store, rank, info.world_size, local_address(info.master_address, info.master_port))


class NcclEngine(DeadlineEngine):
    """Backend `nccl_deadline`."""

    def _new_group(self, store: TCPStore, rank: int, info: InitInfo) -> Group:
        return NcclGroup(store, rank, info.world_size, _current_gpu())

    def _warm_up(self) -> None:
        if os.environ.get(PROOF_VARIABLE) != "sha256":
            from functional.engine import nh_triton  # needs a GPU

            nh_triton.check(_current_gpu())


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.accelerator.current_device_index())


def worker_rank(parallel: ParallelConfig) -> int:
    """Rank among this engine's workers: data-parallel replicas one after the other, as vLLM's own engine counts."""
    return parallel.data_parallel_index * parallel.world_size + parallel.rank

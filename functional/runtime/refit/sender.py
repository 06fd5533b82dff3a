"""The trainer's end of a weight transfer: rank 0 of a group with every worker, with a deadline on each wait."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional.engine.errors import TransferError, TransferTimeout
from functional.engine.gloo import GlooGroup
from functional.engine.group import Group, Rendezvous
from functional.engine.nccl import NcclGroup
from functional.engine.transports import BACKENDS
from functional.engine.wire import DEFAULT_TIMEOUT_S, Manifest, send, update_info

__all__ = ["Sender", "TransferError", "TransferStats", "TransferTimeout", "make_sender", "update_info"]


@dataclass(frozen=True)
class TransferStats:
    """What one `send` moved."""

    nbytes: int
    chunks: int
    seconds: float


class Sender:
    """Forms a group, sends, is thrown away after the first failure.

    The workers' `init_weights_update_group` and `update_weights` calls must run while `connect` and `send` do: each
    side waits for the other.
    """

    def __init__(self, backend: str, device: torch.device | str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """`backend` is the recipe's transport (gloo, nccl); `device` the trainer's (nccl sends from there)."""
        if backend not in (*BACKENDS, *BACKENDS.values()):
            raise ValueError(f"transport {backend!r} is not one of {', '.join(BACKENDS)}")
        self._cpu = backend == BACKENDS["gloo"]
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._rendezvous: Rendezvous | None = None
        self._group: Group | None = None
        self._aborted: str | None = None
        self._lock = threading.Lock()

    def listen(self, address: str, port: int = 0) -> int:
        """Open the rendezvous on `address`; returns its port, for the workers' `init_info`."""
        self._rendezvous = Rendezvous(address, port, self._timeout_s)
        return self._rendezvous.port

    def connect(self, address: str, port: int, world_size: int) -> None:
        """Form the group of this sender and `world_size - 1` workers.

        Raises TransferTimeout naming the ranks that did not come, TransferError for one that failed.
        """
        if self._rendezvous is None:
            self.listen(address, port)
        assert self._rendezvous is not None
        group = self._new_group(self._rendezvous, world_size)
        with self._lock:
            self._group = group
            if self._aborted is not None:
                group.abort(self._aborted)
        group.form(self._timeout_s)

    def send(
        self, named: Iterable[tuple[str, Tensor]], packed: bool = True, info: dict[str, Any] | None = None
    ) -> TransferStats:
        """Send every tensor to every worker; returns when the last byte has left.

        With `info` (what `update_info` gave for these tensors) they are taken one by one; without, all are held first.
        Raises TransferTimeout or TransferError; the group is then broken.
        """
        if self._group is None:
            raise TransferError("send: connect first")
        if info is None:
            named = list(named)
            manifest = Manifest.of(named, packed)
        else:
            manifest = Manifest.from_info(**{key: info[key] for key in _MANIFEST_KEYS})
        started = time.monotonic()
        send(self._group, manifest, named, self._timeout_s)
        return TransferStats(manifest.nbytes, len(list(manifest.chunks())), time.monotonic() - started)

    def abort(self, reason: str) -> None:
        """From another thread, when a worker is known to be lost: ends a blocked `send` with TransferError."""
        with self._lock:
            self._aborted = reason
            if self._group is not None:
                self._group.abort(reason)

    def close(self) -> None:
        """Let the group and the rendezvous go, once the workers' update calls have returned. Harmless when repeated."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._rendezvous = None

    def _new_group(self, rendezvous: Rendezvous, world_size: int) -> Group:
        if self._cpu:
            return GlooGroup(rendezvous.store, 0, world_size, rendezvous.address)
        return NcclGroup(rendezvous.store, 0, world_size, self._device)


def make_sender(backend: str, device: torch.device | str, timeout_s: float = DEFAULT_TIMEOUT_S) -> Sender:
    """A sender for the recipe's transport."""
    return Sender(backend, device, timeout_s)


_MANIFEST_KEYS = ("names", "dtype_names", "shapes", "packed", "packed_buffer_size_bytes")

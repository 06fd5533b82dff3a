"""Transport over gloo: CPU tensors, TCP between the ranks."""

import atexit
import ctypes
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from functional.engine.group import Group


class GlooBroadcast:
    """See `group.Pending`."""

    def __init__(self, work: Work, buffer: Tensor) -> None:
        self._work = work
        self.buffer = buffer

    def done(self) -> bool:
        if not self.ended():
            return False
        self._work.wait()  # raises what went wrong
        return True

    def ended(self) -> bool:
        return self._work.is_completed()


class GlooGroup(Group):
    """Listens on `bind` only, the address on the way to rank 0: loopback for a group of one machine."""

    def __init__(self, store: TCPStore, rank: int, world_size: int, bind: str) -> None:
        _drop_ended()
        self._bind = bind
        self._gloo: dict[tuple[int, ...], Any] = {}  # receivers → process group; torch's stubs know few of its methods
        self._started: list[GlooBroadcast] = []
        super().__init__(store, rank, world_size, torch.device("cpu"))

    def start(self, buffer: Tensor, ranks: tuple[int, ...] | None = None) -> GlooBroadcast:
        self.check()
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self.remaining_s())
        broadcast = GlooBroadcast(self._gloo[ranks or self.receivers].broadcast([buffer], options), buffer)
        self._started = [*(earlier for earlier in self._started if not earlier.ended()), broadcast]
        return broadcast

    def _form(self) -> None:
        self._split(self.receivers)

    def _split(self, ranks: tuple[int, ...]) -> None:
        members = (0, *ranks)
        if self.rank not in members or ranks in self._gloo:
            return
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._bind)]
        options._timeout = timedelta(seconds=self.remaining_s())
        prefix = "/".join(["gloo", *map(str, ranks)])
        store = PrefixStore(prefix, self.store)
        self._gloo[ranks] = gloo(store, members.index(self.rank), len(members), options)

    def _interrupt(self) -> None:
        pass  # every wait is a poll of `Group.wait`

    def _release(self) -> None:
        # gloo cannot end a broadcast that waits for its peer, and the destructor would wait for it with the
        # interpreter locked. Its own deadline ends it; a later group, or the end of the process, takes the rest away.
        if self._gloo:
            _released.append((list(self._gloo.values()), self._started))
        self._gloo, self._started = {}, []
        _drop_ended()


_released: list[tuple[list[Any], list[GlooBroadcast]]] = []


def _drop_ended() -> None:
    _released[:] = [(gloo, started) for gloo, started in _released if not all(one.ended() for one in started)]


@atexit.register
def _leave_the_rest() -> None:
    """A process that ends does not wait for a dead peer: what is still waiting is never destroyed."""
    _drop_ended()
    for gloo, _ in _released:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))  # the list, and what is in it

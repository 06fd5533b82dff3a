"""Transport over NCCL: CUDA tensors, with communicators that can be interrupted.

torch's ProcessGroupNCCL ends the process when its watchdog fires, and vLLM's PyNcclCommunicator blocks for good when a
peer dies. So this binds the few NCCL calls needed, in non-blocking mode: no call blocks, progress is polled against a
deadline, and ncclCommAbort ends a kernel that waits for a dead peer.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from functional.engine.errors import TransferError
from functional.engine.group import Group, Pending

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_NO_COLOR = -1
_CONFIG_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400  # the version that `_Config` has the fields of; NCCL takes the rest from its defaults
_ABORT_S = 5.0


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


class Nccl:
    """The library that torch has loaded, so that one process has one NCCL; NCCL_LIBRARY names another."""

    def __init__(self) -> None:
        path = os.environ.get("NCCL_LIBRARY") or _loaded_path() or "libnccl.so.2"
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise TransferError(f"cannot load NCCL from {path}: {error}; set NCCL_LIBRARY to libnccl.so.2") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclCommInitRankConfig.argtypes = [
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config),
        ]  # fmt: skip
        self._library.ncclBroadcast.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self._library.ncclCommSplit.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(_Config),
        ]  # fmt: skip
        self._library.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        self._library.ncclCommAbort.argtypes = [ctypes.c_void_p]

    def version(self) -> str:
        number = ctypes.c_int()
        self._check(self._library.ncclGetVersion(ctypes.byref(number)), "ncclGetVersion")
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def new_id(self) -> bytes:
        unique = _UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
        return bytes(unique)

    def begin_init(self, unique: bytes, rank: int, world_size: int) -> ctypes.c_void_p:
        comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        status = self._library.ncclCommInitRankConfig(
            ctypes.byref(comm), world_size, _UniqueId.from_buffer_copy(unique), rank, ctypes.byref(config)
        )
        self._check(status, "ncclCommInitRankConfig")
        return comm

    def begin_split(self, comm: ctypes.c_void_p, is_member: bool, rank: int) -> ctypes.c_void_p:
        """A communicator of the members, in the order of their ranks; it is there once `comm` is no more in progress,
        and null for others."""
        split = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        status = self._library.ncclCommSplit(
            comm, 0 if is_member else _NO_COLOR, rank, ctypes.byref(split), ctypes.byref(config)
        )
        self._check(status, "ncclCommSplit")
        return split

    def begin_broadcast(self, comm: ctypes.c_void_p, address: int, nbytes: int, stream: int) -> None:
        status = self._library.ncclBroadcast(address, address, nbytes, _UINT8, 0, comm, stream)
        self._check(status, "ncclBroadcast")

    def in_progress(self, comm: ctypes.c_void_p) -> bool:
        """Whether the last call still goes on. Raises what it, or a kernel of this communicator, met."""
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(comm, ctypes.byref(state)), "ncclCommGetAsyncError")
        self._check(state.value, "communicator")
        return state.value == _IN_PROGRESS

    def abort(self, comm: ctypes.c_void_p) -> None:
        self._library.ncclCommAbort(comm)

    def _check(self, status: int, call: str) -> None:
        if status not in (_SUCCESS, _IN_PROGRESS):
            raise TransferError(f"{call}: {self._library.ncclGetErrorString(status).decode()}")


class NcclBroadcast:
    """See `group.Pending`."""

    def __init__(self, group: "NcclGroup", event: torch.cuda.Event, buffer: Tensor, receivers: tuple[int, ...]) -> None:
        self._group = group
        self._event = event
        self._receivers = receivers
        self.buffer = buffer

    def done(self) -> bool:
        self._group.check_communicator(self._receivers)
        return bool(self._event.query())

    def follow(self) -> None:
        self._event.wait()


class NcclGroup(Group):
    """One communicator on `device`; broadcasts run on a stream of their own, beside the loading of what arrived."""

    def __init__(self, store: TCPStore, rank: int, world_size: int, device: torch.device) -> None:
        self._nccl = Nccl()
        self._comms: dict[tuple[int, ...], ctypes.c_void_p] = {}  # receivers → communicator of rank 0 and these
        self._comm_lock = threading.Lock()  # held by each short call, so that none runs on what an abort frees
        self._stream = torch.cuda.Stream(device)
        super().__init__(store, rank, world_size, device)

    def start(self, buffer: Tensor, ranks: tuple[int, ...] | None = None) -> NcclBroadcast:
        self.check()
        receivers = ranks or self.receivers
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with self._communicator(receivers) as comm:
                self._nccl.begin_broadcast(comm, buffer.data_ptr(), buffer.numel(), self._stream.cuda_stream)
            self._until_done(receivers)  # only then is the kernel on the stream
            event = torch.cuda.Event()
            event.record(self._stream)
        return NcclBroadcast(self, event, buffer, receivers)

    def follow(self, pending: Pending) -> None:
        """The host goes on: only the stream waits. A broadcast that never ends is met by whoever waits for a later."""
        assert isinstance(pending, NcclBroadcast)
        self.check()
        pending.follow()

    def check_communicator(self, receivers: tuple[int, ...]) -> None:
        """Raises what a kernel of the communicator met (a network error, say)."""
        with self._communicator(receivers) as comm:
            self._nccl.in_progress(comm)

    def _form(self) -> None:
        if self.rank == 0:
            self.store.set("nccl", self._nccl.new_id().hex())
        unique = bytes.fromhex(self._get("nccl"))
        with torch.cuda.device(self.device), self._comm_lock:
            self._comms[self.receivers] = self._nccl.begin_init(unique, self.rank, self.world_size)
        self._until_done(self.receivers)

    def _split(self, ranks: tuple[int, ...]) -> None:
        if ranks in self._comms:
            return
        is_member = self.rank in (0, *ranks)
        with torch.cuda.device(self.device), self._communicator(self.receivers) as comm:
            split = self._nccl.begin_split(comm, is_member, self.rank)
        self._until_done(self.receivers)
        if is_member:
            with self._comm_lock:
                self._comms[ranks] = split
            self._until_done(ranks)

    def _interrupt(self) -> None:
        # Never ncclCommFinalize, not even for a group that did well: it would wait for the other ranks to do the same.
        comms = self._take()
        if comms:
            ending = threading.Thread(target=self._abort, args=(comms,), name="nccl-abort", daemon=True)
            ending.start()
            ending.join(_ABORT_S)

    def _abort(self, comms: list[ctypes.c_void_p]) -> None:
        for comm in comms:
            self._nccl.abort(comm)

    def _release(self) -> None:
        self._interrupt()

    def _take(self) -> list[ctypes.c_void_p]:
        """All communicators, split ones first."""
        with self._comm_lock:
            comms, self._comms = list(self._comms.values()), {}
        return comms[::-1]

    def _until_done(self, receivers: tuple[int, ...]) -> None:
        """Until the last call on that communicator has done its part on this side."""
        pause = 20e-6
        while True:
            with self._communicator(receivers) as comm:
                if not self._nccl.in_progress(comm):
                    return
            time.sleep(pause)
            pause = min(pause * 2, 1e-3)

    @contextlib.contextmanager
    def _communicator(self, receivers: tuple[int, ...]) -> Iterator[ctypes.c_void_p]:
        self.check()
        with self._comm_lock:
            if receivers not in self._comms:
                raise self._broken or TransferError("the NCCL communicator is gone")
            yield self._comms[receivers]


def _loaded_path() -> str | None:
    """Path of the NCCL library in this process; else the one in torch's environment."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if "libnccl.so" in line:
                return line.split(maxsplit=5)[5].strip()
    beside_torch = Path(torch.__file__).parent.parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    return str(beside_torch) if beside_torch.exists() else None

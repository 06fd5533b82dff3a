"""A group of one sender (rank 0) and its receivers, in which no wait is without a deadline.

Rank 0 holds a TCP store; it serves the rendezvous, the agreement on each transfer's manifest, and a note by which the
first rank that fails tells the others why. A group that failed once stays broken: form a new one.
"""

import contextlib
import math
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from functional.engine.errors import TransferError, TransferTimeout

_T = TypeVar("_T")

_FAILED = "failed"
_NOTE_POLL_S = 0.2
_POLL_S = 0.05
_TELL_S = 1.0
_POLLERS_FIRST_S = 0.25  # who polls says more about what is missing than the watchdog can


class Pending(Protocol):
    """A broadcast under way."""

    buffer: Tensor

    def done(self) -> bool:
        """Whether it ended; raises when it ended badly."""


class Rendezvous:
    """Rank 0's store. It listens from the start, so its port can be told to the workers before they are waited for."""

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        listener = socket.create_server((address, port), backlog=128)
        self.address = address
        self.port: int = listener.getsockname()[1]
        self.store = TCPStore(
            address,
            self.port,
            None,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """A receiver's connection to rank 0's store."""
    deadline = time.monotonic() + timeout_s + _POLLERS_FIRST_S

    def connect() -> TCPStore:
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(address, port, None, is_master=False, timeout=timeout, wait_for_workers=False)

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("it does not answer")

    try:
        return _polled(connect, check)
    except (RuntimeError, TimeoutError) as error:
        raise TransferTimeout(f"no sender at {address}:{port} within {timeout_s:g} s ({_first_line(error)})") from error


def local_address(peer: str, port: int) -> str:
    """This machine's address on the way to `peer` (no packet is sent)."""
    family, kind, proto, _, target = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


class Group(ABC):
    """Shared by the transports; each adds how a broadcast is started and how a blocked one is interrupted."""

    def __init__(self, store: TCPStore, rank: int, world_size: int, device: torch.device) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._broken: TransferError | None = None
        self._told = False  # another rank failed first, and all know
        self._missed = ""
        self._break_lock = threading.Lock()
        self._deadline = math.inf
        self.transfers = 0
        """Begun so far, the same on every rank: part of the keys of what is put within one."""
        self.agreements = 0
        """How many this group has come to, as those count who make them: part of their keys."""

    def form(self, timeout_s: float) -> None:
        """Join the other ranks. Raises TransferTimeout when not all came in time, TransferError when one failed."""
        with self._failing_together(), self._armed(timeout_s, "forming the group"):
            self._await_everyone()
            self._form()

    @contextlib.contextmanager
    def agreement(self, timeout_s: float, what: str) -> Iterator[None]:
        """The span of an exchange by `put` and `get`: deadline armed, a failure told to the other ranks."""
        with self._failing_together(), self._armed(timeout_s, what):
            self.check()
            yield

    def put(self, key: str, text: str) -> None:
        """For any rank to `get`; a key is used once."""
        self._ask(lambda: self.store.set(key, text))

    def get(self, key: str) -> str:
        """What a rank put there, once it has."""
        return self._get(key)

    def take(self, key: str) -> str:
        """The same, by the only rank that asks for it: the store forgets it then."""
        text = self._get(key)
        self._ask(lambda: self.store.delete_key(key))
        return text

    def split(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Ways from rank 0 to these sets of ranks, for `start`. All ranks name the same, in the same order, within an
        agreement; what an earlier call made stays."""
        for ranks in sets:
            if ranks != self.receivers:
                self._split(ranks)

    @property
    def receivers(self) -> tuple[int, ...]:
        """All ranks but the sender's."""
        return tuple(range(1, self.world_size))

    @contextlib.contextmanager
    def transfer(self, timeout_s: float, manifest_digest: str) -> Iterator[None]:
        """The span of one transfer: deadline armed, manifests compared, a failure told to the other ranks."""
        with self._failing_together(), self._armed(timeout_s, "the transfer"):
            self.check()
            self.transfers += 1
            key = f"manifest/{self.transfers}"
            if self.rank == 0:
                self._ask(lambda: self.store.set(key, manifest_digest))
            elif self._get(key) != manifest_digest:
                raise TransferError(
                    "the sender's manifest (names, dtypes, shapes, packing) differs from this update's update_info"
                )
            yield

    def wait(self, pending: Pending) -> None:
        """Until the broadcast ended. Raises at the deadline, or when any rank reported a failure."""
        for _ in _looks():
            if self._is_done(pending):
                break
            self.check()
        self.check()

    def follow(self, pending: Pending) -> None:
        """Have what this thread does next with the buffer, on the current stream of a GPU, come after the broadcast.

        Here it is waited for. Raises as `wait` does.
        """
        self.wait(pending)

    def check(self) -> None:
        """Raises when the group is broken or its deadline has passed."""
        if self._broken is None and time.monotonic() > self._deadline:
            self._break(TransferTimeout(self._missed))
        if self._broken is not None:
            raise self._broken

    def abort(self, reason: str) -> None:
        """Break the group from any thread: a blocked call in it raises TransferError soon after."""
        self._break(TransferError(reason))

    def close(self) -> None:
        """Let the transport go. A healthy group ends without a word to the others."""
        if self._broken is None:
            self._broken = TransferError("the group is closed")
        self._release()

    @abstractmethod
    def start(self, buffer: Tensor, ranks: tuple[int, ...] | None = None) -> Pending:
        """Start to broadcast a uint8 buffer: rank 0's bytes go to all others, or to `ranks`, for which the group was
        split. Called by rank 0 and these only."""

    @abstractmethod
    def _form(self) -> None:
        """Set the transport up; everyone is there."""

    @abstractmethod
    def _split(self, ranks: tuple[int, ...]) -> None:
        """Set a transport up from rank 0 to `ranks`. All ranks of the group call it."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End what blocks. Called once, from any thread, when the group breaks."""

    @abstractmethod
    def _release(self) -> None:
        """Free the transport's resources; never blocks without bound."""

    def remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def _await_everyone(self) -> None:
        self._ask(lambda: self.store.set(f"here/{self.rank}", "1"))
        while missing := self._ask(self._missing_ranks):
            if time.monotonic() > self._deadline:
                self._break(TransferTimeout(f"rank(s) {missing} of {self.world_size} did not join in time"))
            self.check()
            time.sleep(0.01)

    def _missing_ranks(self) -> list[int]:
        return [rank for rank in range(self.world_size) if not self.store.check([f"here/{rank}"])]

    def _get(self, key: str) -> str:
        for _ in _looks():
            value = self._ask(lambda: self.store.get(key) if self.store.check([key]) else None)
            if value is not None:
                break
            self.check()
        assert value is not None
        return value.decode()

    def _ask(self, question: Callable[[], _T]) -> _T:
        """An answer of the store, which gives none while rank 0 is stopped; raises as `check` does."""
        return _polled(question, self.check)

    def _tell(self, note: str) -> None:
        end = time.monotonic() + _TELL_S

        def check() -> None:
            if time.monotonic() > end:
                raise TimeoutError

        with contextlib.suppress(RuntimeError, TimeoutError):
            _polled(lambda: self.store.set(_FAILED, note), check)

    def _hear_cause(self) -> None:
        """A transport's error is often the consequence of another rank's: raises that one if it is told soon."""
        end = time.monotonic() + 2 * _NOTE_POLL_S
        while time.monotonic() < end:
            self.check()
            time.sleep(_POLL_S)

    def _is_done(self, pending: Pending) -> bool:
        try:
            return pending.done()
        except RuntimeError as error:
            self._hear_cause()
            raise TransferError(_first_line(error)) from error

    def _break(self, error: TransferError) -> None:
        with self._break_lock:
            if self._broken is not None:
                return
            self._broken = error
        self._interrupt()

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._break(error if isinstance(error, TransferError) else TransferError(_first_line(error)))
            if not self._told:
                self._tell(f"rank {self.rank}: {_first_line(error)}")
            self._release()
            raise

    @contextlib.contextmanager
    def _armed(self, timeout_s: float, what: str) -> Iterator[None]:
        """Two threads guard the span: the caller may sit in a call that cannot be polled (a CUDA synchronisation)."""
        self._deadline = time.monotonic() + timeout_s
        over = threading.Event()
        self._missed = f"{what} missed its deadline of {timeout_s:g} s"

        def enforce_deadline() -> None:
            if not over.wait(timeout_s + _POLLERS_FIRST_S):
                self._break(TransferTimeout(self._missed))

        def heed_others() -> None:
            while not over.wait(_NOTE_POLL_S):
                try:
                    note = self.store.get(_FAILED).decode() if self.store.check([_FAILED]) else None
                except RuntimeError as error:
                    note = f"the sender's store is gone ({_first_line(error)})"
                if note is not None:
                    if not over.is_set():
                        self._told = True
                        self._break(TransferError(note))
                    return

        for guard in (enforce_deadline, heed_others):
            threading.Thread(target=guard, name=f"transfer-{guard.__name__}", daemon=True).start()
        try:
            yield
        finally:
            over.set()


def _looks() -> Iterator[None]:
    """Moments to look whether something has happened, for good: often at first, then a sixteenth of the time waited so
    far apart, at most 1 ms."""
    began = time.monotonic()
    while True:
        yield
        time.sleep(min(max((time.monotonic() - began) / 16, 20e-6), 1e-3))


def _polled(action: Callable[[], _T], check: Callable[[], None]) -> _T:
    """Result of an action that may block for good; given up, with its thread, when `check` raises."""
    answer: Future[_T] = Future()

    def act() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=act, name="transfer-store", daemon=True).start()
    while True:
        try:
            return answer.result(timeout=_POLL_S)
        except TimeoutError:
            if answer.done():
                raise
            check()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

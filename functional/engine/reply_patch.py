"""Patch of vLLM 0.23.0: where a call fails on one rank, its executor leaves the later ranks' answers in their queues.

The next call would take them for its own: an old success for a proof, or an old refusal for a success. Here every rank
is heard before the first failure is raised.
"""

import importlib
import inspect
from typing import Any

PATCHED_VERSION = "0.23.0"
_RAISES_AT_FIRST = "if status != WorkerProc.ResponseStatus.SUCCESS:"


def apply() -> None:
    """Patch the class in this process. Does nothing the second time.

    Raises RuntimeError when the method is not the one that this was written for.
    """
    executor = _patched_module().MultiprocExecutor
    original = executor.collective_rpc
    if is_applied():
        return
    if _RAISES_AT_FIRST not in inspect.getsource(original):
        raise RuntimeError(f"MultiprocExecutor.collective_rpc is another one: is this vLLM {PATCHED_VERSION}?")

    def collective_rpc(self: Any, *arguments: Any, **options: Any) -> Any:
        queues = self.response_mqs
        if not isinstance(queues, _Queues):
            self.response_mqs = _Queues(queues)
        return original(self, *arguments, **options)

    setattr(collective_rpc, "hears_every_rank", True)  # noqa: B010 (a function has no such field to mypy)
    executor.collective_rpc = collective_rpc


def is_applied() -> bool:
    return getattr(_patched_module().MultiprocExecutor.collective_rpc, "hears_every_rank", False)


class _Queues(list[Any]):
    """The ranks' queues of answers. Whoever goes through them, as a call to all ranks does, gets at the first what all
    answer; single ones are as they were."""

    def __iter__(self) -> Any:
        heard: list[tuple[Any, Any]] = []
        return iter([_Heard(self, rank, heard) for rank in range(len(self))])


class _Heard:
    """One rank's queue within a call to all."""

    def __init__(self, queues: _Queues, rank: int, heard: list[tuple[Any, Any]]) -> None:
        self._queues = queues
        self._rank = rank
        self._heard = heard

    def dequeue(self, timeout: float | None = None, **options: Any) -> tuple[Any, Any]:
        if not self._heard:
            self._heard += [self._queues[rank].dequeue(timeout=timeout, **options) for rank in range(len(self._queues))]
        return self._heard[self._rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queues[self._rank], name)


def _patched_module() -> Any:
    return importlib.import_module("vllm.v1.executor.multiproc_executor")

"""Patch of vLLM 0.23.0: `AsyncLLM.pause_generation` ends in a fixed sleep of 20 ms, most of what a pause takes.

It lets the last outputs of requests in flight reach their callers before the pause returns, and is not needed for
correctness, as vLLM's own comment says. Here the pause waits for just these, no longer than before: with nothing in
flight, not at all.
"""

import asyncio
import importlib
import inspect
import time
from typing import Any

PATCHED_VERSION = "0.23.0"
_SLEEP = "await asyncio.sleep(0.02)"
_LONGEST_S = 0.02
_POLL_S = 0.0005


def applies_to(vllm_version: str) -> bool:
    """Whether this vLLM has the sleep. Local parts (`+cpu`) do not matter."""
    return vllm_version.split("+")[0] == PATCHED_VERSION


def apply() -> None:
    """Patch the class in this process. Does nothing the second time.

    Raises RuntimeError when the method is not the one that this was written for.
    """
    engine = _patched_class()
    original = engine.pause_generation
    if is_applied():
        return
    if inspect.getsource(original).rstrip().splitlines()[-1].strip() != _SLEEP:
        raise RuntimeError(f"AsyncLLM.pause_generation does not end in `{_SLEEP}`: is this vLLM {PATCHED_VERSION}?")

    async def pause_generation(
        self: Any, *, mode: str = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        if wait_for_inflight_requests:  # deprecated: as it was, warning included
            await original(self, wait_for_inflight_requests=True, clear_cache=clear_cache)
            return
        if clear_cache:
            await self.renderer.clear_mm_cache_async()
        await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        end = time.monotonic() + _LONGEST_S
        while self.output_processor.has_unfinished_requests() and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)

    setattr(pause_generation, "waits_for_outputs_only", True)  # noqa: B010 (a function has no such field to mypy)
    engine.pause_generation = pause_generation


def is_applied() -> bool:
    return getattr(_patched_class().pause_generation, "waits_for_outputs_only", False)


def _patched_class() -> Any:
    return importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM

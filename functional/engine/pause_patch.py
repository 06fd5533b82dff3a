"""Patch of vLLM 0.23.0: `AsyncLLM.pause_generation` ends in a fixed sleep of 20 ms, most of what a pause takes.

The sleep lets the last outputs of requests in flight reach their callers before the pause returns; vLLM's own comment
says that correctness does not need it. Here an engine with no request in flight is paused without it in the mode
`wait`, which this kit uses; other modes are as shipped.
"""

import importlib
import inspect
from typing import Any

PATCHED_VERSION = "0.23.0"
_SLEEP = "await asyncio.sleep(0.02)"


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
        in_flight = self.output_processor.has_unfinished_requests()
        if mode != "wait" or wait_for_inflight_requests or in_flight:
            await original(
                self, mode=mode, wait_for_inflight_requests=wait_for_inflight_requests, clear_cache=clear_cache
            )
            return
        if clear_cache:
            await self.renderer.clear_mm_cache_async()
        await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    setattr(pause_generation, "is_without_sleep_when_idle", True)  # noqa: B010 (a function has no such field to mypy)
    engine.pause_generation = pause_generation


def is_applied() -> bool:
    return getattr(_patched_class().pause_generation, "is_without_sleep_when_idle", False)


def _patched_class() -> Any:
    return importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM

"""A pause of a real engine: no fixed sleep with nothing in flight, and every output delivered first otherwise."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM

from functional.engine import pause_patch

SLEEP_S = 0.02


def on_engine(folder: Path, work: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        arguments = AsyncEngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
            max_num_seqs=4,
        )  # fmt: skip
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            return await work(engine)
        finally:
            engine.shutdown()

    return asyncio.run(run())


async def pause_s(engine: AsyncLLM) -> float:
    """The shortest of some pauses of an idle engine."""
    times = []
    for _ in range(10):
        began = time.monotonic()
        await engine.pause_generation(mode="wait")
        times.append(time.monotonic() - began)
        await engine.resume_generation()
    return min(times)


async def finished_before_pause(engine: AsyncLLM) -> list[bool]:
    """Requests under way: whether each had ended for its caller when the pause returned."""

    begun = [asyncio.Event() for _ in range(4)]

    async def request(number: int) -> None:
        parameters = SamplingParams(
            max_tokens=60 + number, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE
        )
        async for output in engine.generate({"prompt_token_ids": [5, 6, 7 + number]}, parameters, f"r{number}"):
            begun[number].set()
            tokens = output.outputs[0].token_ids
        assert len(tokens) == 60 + number

    tasks = [asyncio.create_task(request(number)) for number in range(4)]
    await asyncio.gather(*(event.wait() for event in begun))  # one that is not scheduled yet would wait for the resume
    assert not any(task.done() for task in tasks)
    await engine.pause_generation(mode="wait")
    ended = [task.done() for task in tasks]
    await engine.resume_generation()
    await asyncio.gather(*tasks)
    return ended


def test_the_sleep_is_gone_and_outputs_still_come_first(versions: list[Path]) -> None:
    original = AsyncLLM.pause_generation

    async def work(engine: AsyncLLM) -> tuple[float, float, list[bool]]:
        pause_patch.apply()
        assert pause_patch.is_applied()
        patched = AsyncLLM.pause_generation
        AsyncLLM.pause_generation = shipped(original)
        before = await pause_s(engine)
        AsyncLLM.pause_generation = patched
        return before, await pause_s(engine), await finished_before_pause(engine)

    before, after, ended = on_engine(versions[0], work)
    print(f"pause of an idle engine: {before * 1e3:.1f} ms, patched {after * 1e3:.1f} ms")
    assert before > SLEEP_S
    assert after < SLEEP_S
    assert ended == [True] * 4


def shipped(method: Any) -> Any:
    """vLLM's own method, also where the plugin has patched it already."""
    return inspect.getclosurevars(method).nonlocals.get("original", method)


def test_another_method_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        async def pause_generation(self) -> None:
            """Pauses, and returns."""

    monkeypatch.setattr(async_llm, "AsyncLLM", Other)
    with pytest.raises(RuntimeError, match="does not end in"):
        pause_patch.apply()

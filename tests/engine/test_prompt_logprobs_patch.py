"""Log-probs of a prompt that a real engine has in its cache: what they begin with."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1 import outputs
from vllm.v1.engine.async_llm import AsyncLLM

from functional.engine import prompt_logprobs_patch

BLOCK = 16
PROMPT = list(range(5, 5 + 2 * BLOCK + 1))


async def ask(engine: AsyncLLM, name: str) -> tuple[int, list[Any]]:
    """Cached tokens, and the prompt's log-probs, as Dynamo asks for them: set once vLLM has read the rest."""
    parameters = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    parameters.prompt_logprobs = 0
    async for output in engine.generate({"prompt_token_ids": PROMPT}, parameters, name):
        last = output
    return last.num_cached_tokens or 0, last.prompt_logprobs or []


def answers(folder: Path) -> list[tuple[int, list[Any]]]:
    """Of a prompt that is new, and the same again."""

    async def run() -> list[tuple[int, list[Any]]]:
        arguments = AsyncEngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
            max_num_seqs=4, block_size=BLOCK, enable_prefix_caching=True,
        )  # fmt: skip
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            return [await ask(engine, "new"), await ask(engine, "again")]
        finally:
            engine.shutdown()

    return asyncio.run(run())


def test_a_request_for_a_prompts_log_probs_reads_the_cache_and_has_zeros_there(versions: list[Path]) -> None:
    (new, told), (cached, again) = answers(versions[0])
    assert new == 0
    assert cached > 0, "a miss would not show that the cache was cleared"
    assert all(token in told[place] for place, token in enumerate(PROMPT) if place)
    assert [set(place) for place in again[1 : cached + 1]] == [{0}] * cached
    values = [
        [place[token].logprob for place, token in list(zip(one, PROMPT, strict=True))[cached + 1 :]]
        for one in (told, again)
    ]
    assert values[0] == pytest.approx(values[1], abs=0.05)


class Used:
    """As vLLM's class, in memory that holds another's bytes."""

    @staticmethod
    def empty_cpu(num_positions: int, num_tokens_per_position: int) -> Any:
        logprob_token_ids = torch.empty((num_positions, num_tokens_per_position), dtype=torch.int32).fill_(-7)
        ranks = torch.empty(num_positions, dtype=torch.int32).fill_(-7)
        return outputs.LogprobsTensors(logprob_token_ids, logprob_token_ids.float(), ranks)


def test_memory_is_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Used.empty_cpu
    monkeypatch.setattr(prompt_logprobs_patch, "_patched_class", lambda: Used)
    prompt_logprobs_patch.apply()
    prompt_logprobs_patch.apply()
    assert prompt_logprobs_patch.is_applied()
    assert Used.empty_cpu is not shipped
    made = Used.empty_cpu(3, 1)
    assert [tensor.unique().tolist() for tensor in made[:3]] == [[0]] * 3


def test_another_method_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        @staticmethod
        def empty_cpu() -> None:
            """Makes tensors."""

    monkeypatch.setattr(outputs, "LogprobsTensors", Other)
    with pytest.raises(RuntimeError, match="is another one"):
        prompt_logprobs_patch.apply()

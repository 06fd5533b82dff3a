"""Patch of vLLM 0.23.0: log-probs of a prompt, part of which the prefix cache held, begin with uninitialised memory.

Dynamo sets `prompt_logprobs` after vLLM has decided whether a request reads the prefix cache, so such a request does
read it, and what was cached has no log-probs. The memory's random token IDs may be negative, which Dynamo's frontend
cannot read. Here those positions hold zeros. A refit's probe asks for such a prompt twice (docs/refit.md).
"""

import importlib
import inspect
from typing import Any

PATCHED_VERSION = "0.23.0"
_UNINITIALISED = "logprob_token_ids = torch.empty("


def apply() -> None:
    """Patch the class in this process. Does nothing the second time.

    Raises RuntimeError when the method is not the one that this was written for.
    """
    tensors = _patched_class()
    original = tensors.empty_cpu
    if is_applied():
        return
    if _UNINITIALISED not in inspect.getsource(original):
        raise RuntimeError(f"LogprobsTensors.empty_cpu is another one: is this vLLM {PATCHED_VERSION}?")

    def empty_cpu(num_positions: int, num_tokens_per_position: int) -> Any:
        made = original(num_positions, num_tokens_per_position)
        for tensor in (made.logprob_token_ids, made.logprobs, made.selected_token_ranks):
            tensor.zero_()
        return made

    setattr(empty_cpu, "is_zeroed", True)  # noqa: B010 (a function has no such field to mypy)
    tensors.empty_cpu = staticmethod(empty_cpu)


def is_applied() -> bool:
    return getattr(_patched_class().empty_cpu, "is_zeroed", False)


def _patched_class() -> Any:
    return importlib.import_module("vllm.v1.outputs").LogprobsTensors

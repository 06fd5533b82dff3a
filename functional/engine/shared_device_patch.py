"""Patch of vLLM 0.23.0: ranks of an engine that share a GPU, which vLLM gives one each. A test topology only.

In force where `VLLM_RANK_DEVICES` names a visible device for each rank, `0,0`. The ranks' collectives need an NCCL that
lets several ranks use a device. Those that map the memory of other devices are off: vLLM's own all-reduce by a flag,
torch's symmetric memory here.
"""

import importlib
import os
from typing import Any

from functional.engine.transports import RANK_DEVICES_VARIABLE

PATCHED_VERSION = "0.23.0"


def is_wanted() -> bool:
    return bool(os.environ.get(RANK_DEVICES_VARIABLE))


def apply() -> None:
    """Patch the GPU's worker in this process. Does nothing the second time."""
    worker = _worker()
    if is_applied():
        return
    original = worker.init_device
    devices = [int(number) for number in os.environ[RANK_DEVICES_VARIABLE].split(",")]

    def init_device(self: Any) -> Any:
        self.local_rank = devices[self.local_rank]
        # It wants as many devices as an engine has ranks, and looks nowhere else.
        accelerator: Any = importlib.import_module("torch").accelerator
        count = accelerator.device_count
        accelerator.device_count = lambda: max(count(), len(devices))
        try:
            return original(self)
        finally:
            accelerator.device_count = count

    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    setattr(init_device, "shares_devices", True)  # noqa: B010 (a function has no such field to mypy)
    worker.init_device = init_device


def is_applied() -> bool:
    return getattr(_worker().init_device, "shares_devices", False)


def _worker() -> Any:
    return importlib.import_module("vllm.v1.worker.gpu_worker").Worker

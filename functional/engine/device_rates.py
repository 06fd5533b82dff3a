"""What a device can do for an update by plan: how fast it copies, and how much memory there is for buffers."""

import time

import psutil
import torch
from torch import Tensor

_SAMPLE_BYTES = 64 * 1024 * 1024
_TRIES = 3


def copied_per_s(device: torch.device) -> float:
    """Bytes that the device copies in a second, measured."""
    source = torch.zeros(_SAMPLE_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _SAMPLE_BYTES / min(_copy_s(target, source) for _ in range(_TRIES))


def free_bytes(device: torch.device) -> int:
    """Memory that a process could still take there."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _copy_s(target: Tensor, source: Tensor) -> float:
    if source.is_cuda:
        torch.cuda.synchronize(source.device)
    began = time.monotonic()
    target.copy_(source)
    if source.is_cuda:
        torch.cuda.synchronize(source.device)
    return time.monotonic() - began

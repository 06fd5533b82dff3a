"""Whether vLLM's layers on this machine's CPU pack their weights, and drop what they were loaded from."""

import torch


def cpu_packs() -> bool:
    """vLLM 0.23.0 packs by oneDNN, which multiplies bfloat16 on an x86 CPU with AVX-512 only."""
    return bool(torch.cpu._is_avx512_supported())

"""CPU layers that compute with the weights they were loaded into, not with a packed copy: for updates by plan on a CPU.

vLLM packs each linear layer's weight for oneDNN and drops it. An engine with VLLM_CPU_RESIDENT_WEIGHTS=1 leaves that
out and computes with `torch.nn.functional.linear`: more slowly, on weights that have an address.
"""

import importlib
import os
from typing import Any

from functional.engine.transports import RESIDENT_VARIABLE


def is_wanted() -> bool:
    return os.environ.get(RESIDENT_VARIABLE) == "1"


def apply() -> None:
    """Have no layer of this process pack, from now on."""
    operations: Any = importlib.import_module("vllm._custom_ops")
    operations._supports_onednn = False

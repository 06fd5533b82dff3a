"""The environment of the fleet's programs.

One order, of which a later part wins: inherited from the caller, then the recipe's `env_vars` (workers only), then the
control plane's addresses, then what the runtime manages. Of what is inherited, other people's settings of the programs
that the runtime manages are left out. docs/configuration.md says why each is.
"""

import os
from collections.abc import Mapping

MANAGED_PREFIXES = ("DYN_", "DYNAMO_", "ETCD_", "NATS_", "RAY_", "PYTHON")
"""Settings of managed programs, and a cluster's service variables of the same names: not inherited, not a recipe's."""

MANAGED_VARIABLES = frozenset(
    {
        "VLLM_PORT",
        "VLLM_HOST_IP",
        "VLLM_NO_USAGE_STATS",
        "VLLM_RENDEZVOUS_DIR",
        "VLLM_RPC_BASE_PATH",
        "VLLM_PLUGINS",  # a list without ours would leave the transfer backends out
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "HF_HUB_OFFLINE",
        "TORCH_COMPILE_DISABLE",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_MULTI_RANK_GPU_ENABLE",
        "PROMETHEUS_MULTIPROC_DIR",  # one folder for several engines would add up their metrics
        "MODEL_EXPRESS_URL",  # Dynamo would load the model from there
    }
)
"""Variables that are neither inherited nor a recipe's to set, beside those with a managed prefix."""

KEPT_OF_VLLM = frozenset(
    {
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "VLLM_ASSETS_CACHE",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOGGING_COLOR",
    }
)
"""What is inherited of vLLM's settings: folders and logs. The others change what is computed: a recipe's to set."""

LAUNCHER = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""The caller's own place among ranks (torchrun, Kubernetes): no engine is one of them."""


def is_inherited(name: str) -> bool:
    """Whether the fleet's programs get this variable from the caller."""
    name = name.upper()
    if name.startswith("VLLM_"):
        return name in KEPT_OF_VLLM
    return not name.startswith(MANAGED_PREFIXES) and name not in MANAGED_VARIABLES and name not in LAUNCHER


def left_out() -> list[str]:
    """Variables of this process that an engine, etcd or NATS would have heeded, and that the fleet does not get."""
    trainers = ("RAY_", "PYTHON", "DYNAMO_")
    heeded = {"CUDA_VISIBLE_DEVICES", "ETCD_BIN", "NATS_SERVER_BIN"}  # by Ray, and by `paths`
    return sorted(
        name for name in os.environ if not is_inherited(name) and not name.startswith(trainers) and name not in heeded
    )


def inherited_environment() -> dict[str, str]:
    """What the fleet's programs get from the caller. `DYNAMO_PYTHONPATH` becomes their PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if is_inherited(name)}
    if path := os.environ.get("DYNAMO_PYTHONPATH"):
        kept["PYTHONPATH"] = path
    return kept


def program_environment(address: str, *parts: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a program that talks to `address`, from parts of which a later one wins.

    A proxy stays the caller's or the recipe's, but never stands between two programs of the fleet.
    """
    merged = {name: value for part in parts for name, value in part.items()} | {"PYTHONUNBUFFERED": "1"}
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [*filter(None, merged.get(name, "").split(",")), "localhost", "127.0.0.1", address]
        merged[name] = ",".join(dict.fromkeys(hosts))
    return merged

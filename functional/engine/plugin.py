"""The vLLM plugin (entry point `vllm.general_plugins`): registers the transfer engines and applies the patches.

vLLM loads it in every process of an engine. `python -m functional.engine.plugin` prints what it does here, as JSON.
"""

import json
import logging
from typing import Any

from functional.engine.transports import BACKENDS

_ENGINES = {BACKENDS["gloo"]: "GlooEngine", BACKENDS["nccl"]: "NcclEngine"}


def register() -> None:
    """Called by vLLM; more than once in some processes."""
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from functional.engine import (
        cpu_experts_patch,
        cpu_proof,
        cpu_resident,
        pause_patch,
        prompt_logprobs_patch,
        reload_patch,
        rendezvous_patch,
        reply_patch,
        shared_device_patch,
    )

    for backend, engine in _ENGINES.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "functional.engine.transfer_engine", engine)
    if reload_patch.applies_to(vllm.__version__):
        reload_patch.apply()
        rendezvous_patch.apply()
    if pause_patch.applies_to(vllm.__version__):
        pause_patch.apply()
    if reply_patch.applies_to(vllm.__version__):
        reply_patch.apply()
    if prompt_logprobs_patch.applies_to(vllm.__version__):
        prompt_logprobs_patch.apply()
    if cpu_experts_patch.applies_to(vllm.__version__):
        cpu_experts_patch.apply()
    if shared_device_patch.is_wanted() and shared_device_patch.applies_to(vllm.__version__):
        shared_device_patch.apply()
    if cpu_resident.is_wanted():
        cpu_resident.apply()
    cpu_proof.install()
    logging.getLogger("vllm.functional").info("dynamo_rl_engine: %s", json.dumps(status()))


def status() -> dict[str, Any]:
    """What is in force in this process."""
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from functional.engine import (
        cpu_experts_patch,
        cpu_proof,
        cpu_resident,
        pause_patch,
        prompt_logprobs_patch,
        reload_patch,
        rendezvous_patch,
        reply_patch,
    )

    return {
        "vllm": vllm.__version__,
        "transfer_backends": sorted(WeightTransferEngineFactory._registry),
        "reload_patch": {"for": reload_patch.PATCHED_VERSION, "applied": reload_patch.is_applied()},
        "pause_patch": {"for": pause_patch.PATCHED_VERSION, "applied": pause_patch.is_applied()},
        "reply_patch": {"for": reply_patch.PATCHED_VERSION, "applied": reply_patch.is_applied()},
        "prompt_logprobs_patch": {
            "for": prompt_logprobs_patch.PATCHED_VERSION,
            "applied": prompt_logprobs_patch.is_applied(),
        },
        "cpu_experts_patch": {
            "for": cpu_experts_patch.PATCHED_VERSION,
            "applied": cpu_experts_patch.applies_to(vllm.__version__) and cpu_experts_patch.is_applied(),
        },
        "file_rendezvous": rendezvous_patch.is_applied(),
        "hash_before_packing": cpu_proof.is_installed(),
        "cpu_weights_resident": cpu_resident.is_wanted(),
    }


if __name__ == "__main__":
    register()
    print(json.dumps(status(), indent=2))

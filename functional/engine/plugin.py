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

    from functional.engine import cpu_proof, cpu_resident
    from functional.engine.patches import PATCHES

    for backend, engine in _ENGINES.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "functional.engine.transfer_engine", engine)
    for patch in PATCHES:
        if patch.is_for_here(vllm.__version__):
            patch.module.apply()
    if cpu_resident.is_wanted():
        cpu_resident.apply()
    cpu_proof.install()
    logging.getLogger("vllm.functional").info("dynamo_rl_engine: %s", json.dumps(status()))


def status() -> dict[str, Any]:
    """What is in force in this process."""
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from functional.engine import cpu_proof, cpu_resident
    from functional.engine.patches import PATCHES

    return {
        "vllm": vllm.__version__,
        "transfer_backends": sorted(WeightTransferEngineFactory._registry),
        "patches": {
            patch.name: {
                "for": patch.module.PATCHED_VERSION,
                "applied": patch.is_for_here(vllm.__version__) and patch.module.is_applied(),
            }
            for patch in PATCHES
        },
        "hash_before_packing": cpu_proof.is_installed(),
        "cpu_weights_resident": cpu_resident.is_wanted(),
    }


if __name__ == "__main__":
    register()
    print(json.dumps(status(), indent=2))

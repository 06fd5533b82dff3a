"""Real vLLM engines with the plugin and the worker extension, as the tests of refits take them."""

import os
from pathlib import Path
from typing import Any

from functional.engine.transports import BACKENDS, PROOF_VARIABLE, ProofKind

TRANSPORT = os.environ.get("TRANSPORT", "gloo")


def new_engine(model: Path, proof: ProofKind, **options: Any) -> Any:
    """An engine that is asked for this kind of proof, which `PROOF_VARIABLE` names from now on; options: vLLM's own."""
    from vllm import LLM

    os.environ[PROOF_VARIABLE] = proof
    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        weight_transfer_config={"backend": BACKENDS[TRANSPORT]},
        gpu_memory_utilization=0.3,
        worker_extension_cls="functional.engine.extension.WorkerExtension",
        **options,
    )

"""How weights get to the engines and are proved there, by device. No torch here: recipes and command lines are made
without it."""

from dataclasses import dataclass
from typing import Literal

ProofKind = Literal["nh", "sha256"]
"""The keyed hash of `nh`, or SHA-256."""
PROOF_VARIABLE = "VLLM_WEIGHTS_PROOF"
"""Tells an engine which of them it will be asked for: `nh` or `sha256`."""
RANK_DEVICES_VARIABLE = "VLLM_RANK_DEVICES"
"""Names a visible GPU for each rank of an engine whose ranks share some: `0,0`."""
RESIDENT_VARIABLE = "VLLM_CPU_RESIDENT_WEIGHTS"
"""Set to 1, a CPU engine computes with the weights as loaded, not with packed ones."""


@dataclass(frozen=True)
class Transport:
    """`name`: what carries the bytes; `backend`: the weight-transfer engine by which vLLM receives them; `proof`: by
    what they are proved unless the recipe says otherwise."""

    name: str
    backend: str
    proof: ProofKind


TRANSPORTS = {"cpu": Transport("gloo", "gloo", "sha256"), "cuda": Transport("nccl", "nccl_deadline", "nh")}
"""By `cluster.device`. vLLM's own `nccl` (no deadline) stays as it is."""
BACKENDS = {transport.name: transport.backend for transport in TRANSPORTS.values()}
"""Names of the backends, by transport."""
PROOFS = {transport.name: transport.proof for transport in TRANSPORTS.values()}
"""What proves weights, by transport."""

"""How weights get to the engines, by device. No torch here: recipes and command lines are made without it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Transport:
    """`name`: what carries the bytes; `backend`: the weight-transfer engine by which vLLM receives them."""

    name: str
    backend: str


TRANSPORTS = {"cpu": Transport("gloo", "gloo"), "cuda": Transport("nccl", "nccl_deadline")}
"""By `cluster.device`. vLLM's own `nccl` (no deadline) stays as it is."""
BACKENDS = {transport.name: transport.backend for transport in TRANSPORTS.values()}
"""Names of the backends, by transport."""

"""What runs inside vLLM: transfer engines with deadlines, proof of weights, version-checked patches.

`errors` and `transports` need nothing, and `wire`, `group`, `gloo`, `nccl` and `proof` torch only: a trainer imports
them too. `plugin`, `transfer_engine`, `extension`, `cpu_proof` and `reload_patch` need vLLM.
"""

"""What runs inside vLLM: transfer engines with deadlines, proof of weights, version-checked patches.

`errors` and `transports` need nothing, `wire`, `group`, `gloo`, `nccl`, `nh` and `proof` torch only, `nh_triton` torch
and Triton: a trainer imports them too. `plugin`, `transfer_engine`, `extension`, `cpu_proof` and `reload_patch` need
vLLM.
"""

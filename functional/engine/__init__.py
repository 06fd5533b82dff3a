"""What runs inside vLLM: transfer engines with deadlines, proof of weights, version-checked patches.

Modules here split in two. `errors`, `wire`, `group`, `gloo`, `nccl` and `proof` need torch only, so a trainer
imports them too. `plugin`, `transfer_engine`, `extension`, `packing` and `reload_patch` need vLLM.
"""

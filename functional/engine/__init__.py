"""What runs inside vLLM: transfer engines with deadlines, proof of weights, version-checked patches.

Modules here split in three. `errors` needs nothing; `wire`, `group`, `gloo`, `nccl` and `proof` need torch only, so a
trainer imports these too. `plugin`, `transfer_engine`, `extension`, `cpu_proof` and `reload_patch` need vLLM.
"""

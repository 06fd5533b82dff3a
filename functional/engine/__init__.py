"""What runs inside vLLM: transfer engines with deadlines, proof of weights, version-checked patches.

`errors` and `transports` need nothing, and `wire`, `group`, `gloo`, `nccl` and `proof` torch only: a trainer imports
them too, and `plan`, `plan_schedule`, `plan_copy` and `plan_wire`. `plugin`, `transfer_engine`, `extension`,
`plan_trace`, `plan_check`, `cpu_proof` and the patches need vLLM.
"""

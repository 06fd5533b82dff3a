"""What runs inside vLLM: transfer engines with deadlines, proof of weights, plans, version-checked patches.

`errors` and `transports` need nothing, `wire`, `group`, `gloo`, `nccl`, `nh`, `proof`, `plan`, `plan_schedule`,
`plan_copy`, `plan_wire`, `plan_proof` and `device_rates` torch only, `nh_triton` torch and Triton: a trainer imports
them too. `plugin`, `transfer_engine`, `extension`, `planned`, `plan_trace`, `plan_check`, `cpu_proof`, `cpu_resident`
and the patches need vLLM; `patches` lists them without it.
"""

"""Recipes that break a rule, each with the key path its error names and a part of what it says."""

import pytest

from functional.runtime.config import RecipeError
from functional.runtime.errors import ConfigError
from functional.runtime.rules import merge_stop_strings

W = "G.dynamo_cfg.worker_args"
F = "G.dynamo_cfg.frontend_args"
MANY = "[" + ",".join(f"s{i}" for i in range(33)) + "]"

REFUSED = [
    # precision
    ("G.vllm_cfg.precision=fp8", "G.vllm_cfg.precision", "bfloat16 only"),
    ("G.vllm_cfg.precision=float16", "G.vllm_cfg.precision", "bfloat16 only"),
    ("G.vllm_cfg.precision=auto", "G.vllm_cfg.precision", "bfloat16 only"),
    ("G.vllm_cfg.kv_cache_dtype=fp8", "G.vllm_cfg.kv_cache_dtype", "set auto"),
    ("G.vllm_cfg.kv_cache_dtype=fp8_e4m3", "G.vllm_cfg.kv_cache_dtype", "set auto"),
    ("G.vllm_cfg.use_deep_gemm=true", "G.vllm_cfg.use_deep_gemm", "unsupported"),
    ("G.vllm_cfg.num_last_layers_in_bf16=1", "G.vllm_cfg.num_last_layers_in_bf16", "all layers are"),
    ("G.vllm_cfg.num_first_layers_in_bf16=2", "G.vllm_cfg.num_first_layers_in_bf16", "all layers are"),
    ("G.vllm_cfg.is_mx=true", "G.vllm_cfg.is_mx", "low-precision"),
    ("G.vllm_cfg.quantization=fp8", "G.vllm_cfg.quantization", "low-precision"),
    ("G.vllm_kwargs.quantization=awq", "G.vllm_kwargs.quantization", "low-precision"),
    ("G.vllm_kwargs.calculate_kv_scales=true", "G.vllm_kwargs.calculate_kv_scales", "low-precision"),
    ("G.quant_cfg=fp8.yaml", "G.quant_cfg", "without quantization"),
    ("G.real_quant=true", "G.real_quant", "without quantization"),
    # parallel sizes and placement
    ("G.vllm_cfg.tensor_parallel_size=8", "G.vllm_cfg.tensor_parallel_size", "fit on one node"),
    ("G.vllm_cfg.tensor_parallel_size=4 G.vllm_cfg.pipeline_parallel_size=2", "G.vllm_cfg.tensor_parallel_size", "8"),
    ("G.vllm_cfg.tensor_parallel_size=3", "G.colocated.resources.gpus_per_node", "do not divide"),
    ("G.vllm_cfg.tensor_parallel_size=0", "G.vllm_cfg.tensor_parallel_size", "greater than"),
    ("G.vllm_cfg.tensor_parallel_size=two", "G.vllm_cfg.tensor_parallel_size", "integer"),
    ("G.vllm_cfg.expert_parallel_size=2", "G.vllm_cfg.expert_parallel_size", "must be 1 or"),
    (
        "G.vllm_cfg.tensor_parallel_size=4 G.vllm_cfg.expert_parallel_size=2",
        "G.vllm_cfg.expert_parallel_size",
        "must be 1 or tensor_parallel_size, 4",
    ),
    ("G.vllm_cfg.data_parallel_size=2", "G.vllm_cfg.data_parallel_size", "managed"),
    ("G.vllm_kwargs.data_parallel_size=2", "G.vllm_kwargs.data_parallel_size", "managed"),
    ("G.vllm_cfg.prefill_context_parallel_size=2", "G.vllm_cfg.prefill_context_parallel_size", "context parallel"),
    ("G.vllm_kwargs.prefill_context_parallel_size=2", "G.vllm_kwargs.prefill_context_parallel_size", "context"),
    ("G.vllm_cfg.decode_context_parallel_size=4", "G.vllm_cfg.decode_context_parallel_size", "context parallel"),
    ("G.vllm_kwargs.decode_context_parallel_size=4", "G.vllm_kwargs.decode_context_parallel_size", "context"),
    ("G.vllm_kwargs.data_parallel_rank=1", "G.vllm_kwargs.data_parallel_rank", "managed"),
    ("G.vllm_kwargs.nnodes=2", "G.vllm_kwargs.nnodes", "one node"),
    ("G.colocated.enabled=true", "G.colocated.enabled", "never colocated"),
    ("G.colocated.resources.gpus_per_node=null", "G.colocated.resources.gpus_per_node", "integer"),
    ("G.colocated.resources.gpus_per_node=8", "cluster.gpus_per_node", "need 9"),
    ("cluster.share_gpu=true", "cluster.share_gpu", "is for cluster.device=cuda"),
    # what the managed runtime does not have
    ("G.vllm_kwargs.speculative_config={method: ngram}", "G.vllm_kwargs.speculative_config", "speculative"),
    ("G.vllm_cfg.speculative_config={method: mtp}", "G.vllm_cfg.speculative_config", "speculative"),
    ("G.speculative_config={method: mtp}", "G.speculative_config", "speculative"),
    ("G.vllm_kwargs.spec_model=draft", "G.vllm_kwargs.spec_model", "speculative"),
    ("G.sglang_cfg={tp_size: 1}", "G.sglang_cfg", "another engine"),
    ("G.trtllm_cfg={tp: 1}", "G.trtllm_cfg", "another engine"),
    ("G.mcore_generation_config={max_tokens: 1}", "G.mcore_generation_config", "another engine"),
    ("G.refit_transport=nixl", "G.refit_transport", "collective"),
    ("G.backend=vllm", "G.backend", "dynamo"),
    ("G.dynamo_cfg.engine=sglang", "G.dynamo_cfg.engine", "vllm"),
    ("G.vllm_kwargs.kv_transfer_config={kv_connector: x}", "G.vllm_kwargs.kv_transfer_config", "aggregated"),
    # sampling
    ("G.top_p=0.95", "G.top_p", "whole distribution"),
    ("G.top_k=50", "G.top_k", "whole distribution"),
    ("G.temperature=0", "G.temperature", "greater than 0"),
    (f"G.stop_strings={MANY}", "G.stop_strings", "33 stop strings"),
    ("G.stop_strings=['']", "G.stop_strings", "empty stop string"),
    ("G.stop_strings=stop", "G.stop_strings", "list"),
    ("G.vllm_cfg.logprobs_mode=raw_logprobs", "G.vllm_cfg.logprobs_mode", "processed_logprobs"),
    ("G.vllm_kwargs.logprobs_mode=processed_logits", "G.vllm_kwargs.logprobs_mode", "processed_logprobs"),
    # moved
    ("G.vllm_cfg.tool_parser_plugin=p.py", "G.vllm_cfg.tool_parser_plugin", "worker_args.tool_call_parser"),
    ("G.vllm_cfg.reasoning_parser_plugin=p.py", "G.vllm_cfg.reasoning_parser_plugin", "worker_args.reasoning_parser"),
    ("G.vllm_kwargs.reasoning_parser=qwen3", "G.vllm_kwargs.reasoning_parser", "worker_args.reasoning_parser"),
    ("G.vllm_kwargs.tool_call_parser=hermes", "G.vllm_kwargs.tool_call_parser", "worker_args.tool_call_parser"),
    ("G.vllm_kwargs.enable_auto_tool_choice=true", "G.vllm_kwargs.enable_auto_tool_choice", "tool_call_parser"),
    (
        "G.vllm_cfg.http_server_serving_chat_kwargs={tool_parser: hermes}",
        "G.vllm_cfg.http_server_serving_chat_kwargs",
        "moved",
    ),
    ("G.vllm_kwargs.dtype=bfloat16", "G.vllm_kwargs.dtype", "vllm_cfg.precision"),
    ("G.vllm_kwargs.tensor_parallel_size=1", "G.vllm_kwargs.tensor_parallel_size", "vllm_cfg.tensor_parallel_size"),
    ("G.vllm_kwargs.max_model_len=64", "G.vllm_kwargs.max_model_len", "vllm_cfg.max_model_len"),
    ("G.vllm_kwargs.enforce_eager=false", "G.vllm_kwargs.enforce_eager", "vllm_cfg.enforce_eager"),
    ("G.vllm_kwargs.enable_expert_parallel=true", "G.vllm_kwargs.enable_expert_parallel", "expert_parallel_size"),
    ("G.vllm_cfg.max_num_seqs=8", "G.vllm_cfg.max_num_seqs", "vllm_kwargs.max_num_seqs"),
    ("G.vllm_cfg.compilation_config={mode: 0}", "G.vllm_cfg.compilation_config", "vllm_kwargs.compilation_config"),
    # managed
    ("G.vllm_kwargs.model=other", "G.vllm_kwargs.model", "policy.model_name"),
    ("G.vllm_kwargs.served_model_name=x", "G.vllm_kwargs.served_model_name", "managed"),
    ("G.vllm_kwargs.weight_transfer_config={backend: nccl}", "G.vllm_kwargs.weight_transfer_config", "managed"),
    ("G.vllm_kwargs.worker_extension_cls=a.B", "G.vllm_kwargs.worker_extension_cls", "managed"),
    ("G.vllm_kwargs.distributed_executor_backend=ray", "G.vllm_kwargs.distributed_executor_backend", "managed"),
    ("G.vllm_kwargs.namespace=mine", "G.vllm_kwargs.namespace", "managed"),
    ("G.vllm_kwargs.enable_rl=false", "G.vllm_kwargs.enable_rl", "managed"),
    ("G.vllm_cfg.enable_prefix_caching=false", "G.vllm_cfg.enable_prefix_caching", "prefix caching stays on"),
    # engine options of the wrong type
    ("G.vllm_kwargs.async_scheduling=5", "G.vllm_kwargs.async_scheduling", "true or false"),
    ("G.vllm_kwargs.max_num_seqs=0", "G.vllm_kwargs.max_num_seqs", "greater than"),
    ("G.vllm_cfg.gpu_memory_utilization=1.5", "G.vllm_cfg.gpu_memory_utilization", "less than"),
    ("G.vllm_cfg=7", "G.vllm_cfg", "dictionary"),
    # the worker's own words
    (f"{W}.extra_cli_args=[--max-num-seqs=8]", f"{W}.extra_cli_args", "already set by"),
    (f"{W}.extra_cli_args=[--max-num-seqs,'8']", f"{W}.extra_cli_args", "already set by"),
    (f"{W}.extra_cli_args=[--max_num_seqs,'8']", f"{W}.extra_cli_args", "already set by"),
    (f"{W}.extra_cli_args=[--max-num-se,'8']", f"{W}.extra_cli_args", "already set by"),
    (f"{W}.extra_cli_args=[--no-enforce-eager]", f"{W}.extra_cli_args", "already set by"),
    (f"{W}.extra_cli_args=[--no_enforce_eager]", f"{W}.extra_cli_args", "already set by"),
    (f"{W}.extra_cli_args=[--dtype=half]", f"{W}.extra_cli_args", "already set by"),
    (f"{W}.extra_cli_args=[--endpoint-types,chat]", f"{W}.extra_cli_args", "already set by"),
    (f"{W}.extra_cli_args=[--gpu-memory-utilization,'0.9']", f"{W}.extra_cli_args", "vllm_cfg.gpu_memory"),
    (f"{W}.extra_cli_args=[--no-enable-rl]", f"{W}.extra_cli_args", "managed"),
    (f"{W}.extra_cli_args=[--enable_rl]", f"{W}.extra_cli_args", "managed"),
    (f"{W}.extra_cli_args=[--namespace=x]", f"{W}.extra_cli_args", "managed"),
    (f"{W}.extra_cli_args=[--worker-extension-cls,a.B]", f"{W}.extra_cli_args", "managed"),
    (f"{W}.extra_cli_args=[--kv-events-config.publisher,'null']", f"{W}.extra_cli_args", "managed"),
    (f"{W}.extra_cli_args=[--no-enable-prefix-caching]", f"{W}.extra_cli_args", "managed"),
    (f"{W}.extra_cli_args=[--quantization,fp8]", f"{W}.extra_cli_args", "unsupported"),
    (f"{W}.extra_cli_args=[--speculative-config.method,ngram]", f"{W}.extra_cli_args", "unsupported"),
    (f"{W}.extra_cli_args=[--dyn-tool-call-parser,hermes]", f"{W}.extra_cli_args", "worker_args.tool_call_parser"),
    (f"{W}.extra_cli_args=[--data-parallel-size,'2']", f"{W}.extra_cli_args", "managed"),
    (f"{W}.extra_cli_args=[-tp,'2']", f"{W}.extra_cli_args", "long name"),
    (f"{W}.extra_cli_args=[--,x]", f"{W}.extra_cli_args", "long name"),
    (f"{W}.extra_cli_args=[stray]", f"{W}.extra_cli_args", "belongs to no flag"),
    (f"{W}.extra_cli_args=[--seed,'1',stray]", f"{W}.extra_cli_args", "belongs to no flag"),
    (f"{W}.extra_cli_args=[--seed=1,stray]", f"{W}.extra_cli_args", "belongs to no flag"),
    (f"{W}.extra_cli_args=[--async-scheduling,stray]", f"{W}.extra_cli_args", "belongs to no flag"),
    (f"{W}.extra_cli_args=[--seed,'1',--seed=2]", f"{W}.extra_cli_args", "twice"),
    (f"{W}.extra_cli_args=[--async-scheduling,--no-async-scheduling]", f"{W}.extra_cli_args", "twice"),
    (f"{W}.extra_cli_args=[--config,flags.yaml]", f"{W}.extra_cli_args", "escape"),
    (f"{W}.extra_cli_args=[--config=flags.yaml]", f"{W}.extra_cli_args", "escape"),
    (f"{W}.extra_cli_args=[--sead,'1']", f"{W}.extra_cli_args", "nearest is --seed"),
    (f"{W}.extra_cli_args=--seed", f"{W}.extra_cli_args", "list"),
    (f"{W}.endpoint_types=[chat]", f"{W}.endpoint_types", "add completions"),
    (f"{W}.custom_jinja_template=/nowhere.jinja", f"{W}.custom_jinja_template", "no such file"),
    (f"{W}.tool_parser=hermes", f"{W}.tool_parser", "nearest known key is tool_call_parser"),
    # the frontend's
    (f"{F}.router_mode=kv-aware", f"{F}.router_mode", "round-robin"),
    (f"{F}.extra_cli_args=[--router-mode,random]", f"{F}.extra_cli_args", "already set by"),
    (f"{F}.extra_cli_args=[--router-mod=random]", f"{F}.extra_cli_args", "already set by"),
    (f"{F}.extra_cli_args=[--http-host,0.0.0.0]", f"{F}.extra_cli_args", "managed"),
    (f"{F}.extra_cli_args=[--kserve-grpc-server]", f"{F}.extra_cli_args", "one listener"),
    (f"{F}.extra_cli_args=[--no-router-reset-states]", f"{F}.extra_cli_args", "already set by"),
    (f"{F}.extra_cli_args=[--router-temprature,'1']", f"{F}.extra_cli_args", "nearest is --router-temperature"),
    # variables
    ("G.vllm_cfg.env_vars.DYN_NAMESPACE=x", "G.vllm_cfg.env_vars.DYN_NAMESPACE", "DYN_*"),
    ("G.vllm_cfg.env_vars.dyn_system_port=1", "G.vllm_cfg.env_vars.dyn_system_port", "DYN_*"),
    ("G.vllm_cfg.env_vars.ETCD_ENDPOINTS=x", "G.vllm_cfg.env_vars.ETCD_ENDPOINTS", "ETCD_*"),
    ("G.vllm_cfg.env_vars.NATS_SERVER=x", "G.vllm_cfg.env_vars.NATS_SERVER", "NATS_*"),
    ("G.vllm_cfg.env_vars.VLLM_PORT=1", "G.vllm_cfg.env_vars.VLLM_PORT", "managed"),
    ("G.vllm_cfg.env_vars.VLLM_PLUGINS=x", "G.vllm_cfg.env_vars.VLLM_PLUGINS", "managed"),
    ("G.vllm_cfg.env_vars.CUDA_VISIBLE_DEVICES=1", "G.vllm_cfg.env_vars.CUDA_VISIBLE_DEVICES", "managed"),
    ("G.vllm_cfg.env_vars.PYTHONPATH=/x", "G.vllm_cfg.env_vars.PYTHONPATH", "PYTHON*"),
    ("G.vllm_cfg.env_vars.A=true", "G.vllm_cfg.env_vars.A", "string"),
    ("G.vllm_cfg.env_vars={'A B': x}", "G.vllm_cfg.env_vars.A B", "no name"),
    # data, misspelt keys
    ("data.dataset_name=OpenMathInstruct-2", "data.dataset_name", "local .jsonl"),
    ("data.dataset_name=/nowhere.jsonl", "data.dataset_name", "no such file"),
    ("grpo.max_num_step=3", "grpo.max_num_step", "nearest known key is max_num_steps"),
    ("G.max_new_token=3", "G.max_new_token", "nearest known key is max_new_tokens"),
    ("G.dynamo_cfg.startup_timeout=3", "G.dynamo_cfg.startup_timeout", "startup_timeout_s"),
    ("G.dynamo_cfg.startup_timeout_s=0", "G.dynamo_cfg.startup_timeout_s", "greater than 0"),
    ("G.dynamo_cfg.metrics_include_prefixes=[a]", "G.dynamo_cfg.metrics_include_prefixes", "metrics_worker_prefixes"),
]

ACCEPTED = [
    "G.vllm_cfg.tensor_parallel_size=2 G.vllm_cfg.pipeline_parallel_size=2",
    "G.vllm_cfg.tensor_parallel_size=4 G.vllm_cfg.expert_parallel_size=4",
    "G.vllm_cfg.data_parallel_size=1 G.vllm_kwargs.decode_context_parallel_size=1",
    "G.vllm_cfg.logprobs_mode=processed_logprobs",
    "G.vllm_cfg.async_engine=true G.vllm_cfg.use_tqdm=true G.vllm_cfg.use_deep_gemm=false",
    "G.vllm_cfg.num_last_layers_in_bf16=0 G.vllm_cfg.is_mx=false G.vllm_cfg.http_refit_server_port=null",
    "G.vllm_cfg.expose_http_server=true G.vllm_cfg.vllm_metrics_logger_interval=0.5",
    "G.vllm_kwargs.compilation_config={cudagraph_mode: NONE} G.vllm_kwargs.moe_backend=triton",
    "G.vllm_cfg.tool_parser_plugin=null G.vllm_kwargs.speculative_config=null",
    "G.mcore_generation_config=null G.refit_transport=null G.real_quant=false G.port_range_low=3000",
    "G.stop_token_ids=[1,2,3,4]",
    f"{W}.extra_cli_args=[--seed,'-1',--async-scheduling,--compilation-config.mode,'0']",
    f"{W}.extra_cli_args=[--compilation-config.mode,'0',--compilation-config.cudagraph_mode=NONE]",
    f"{W}.extra_cli_args=[--cudagraph-capture-sizes,'1','2','4',--no-enable-chunked-prefill]",
    f"{F}.router_mode=round-robin",
    f"{F}.extra_cli_args=[--router-temperature=0.5]",
    "G.vllm_cfg.env_vars={NCCL_MNNVL_ENABLE: 0, VLLM_LOGGING_LEVEL: DEBUG}",
    "data.dataset_name=token_set",
]


def key_of(short):
    return "policy.generation" + short[1:] if short.startswith("G.") else short


def split(overrides):
    """`key=value` parts; a space before `G.` starts the next."""
    parts = overrides.split(" G.")
    return [parts[0], *("G." + part for part in parts[1:])]


@pytest.mark.parametrize(("overrides", "key", "message"), REFUSED)
def test_refused(load, overrides, key, message):
    with pytest.raises(RecipeError) as caught:
        load(*split(overrides))
    assert [problem.key for problem in caught.value.problems] == [key_of(key)]
    assert message in caught.value.problems[0].message
    assert f"{key_of(key)}=" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_table_is_long_enough():
    assert len({overrides for overrides, _, _ in REFUSED}) == len(REFUSED) >= 60


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_accepted(load, overrides):
    assert load(*split(overrides)).warnings() == []


def test_all_errors_come_at_once(load):
    with pytest.raises(RecipeError) as caught:
        load("G.vllm_kwargs.dtype=half", "G.colocated.enabled=true", "G.vllm_cfg.env_vars.DYN_X=1")
    assert len(caught.value.problems) == 3


def test_variables_of_a_shared_gpu_are_managed_there(load):
    alone = "G.vllm_cfg.env_vars.NCCL_CUMEM_ENABLE=1"
    load(alone)
    with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE"):
        load(alone, "cluster.share_gpu=true", "cluster.device=cuda")


def test_stop_strings_are_counted_once_merged():
    assert merge_stop_strings(["a", "b"], None, ["b", "c"]) == ("a", "b", "c")
    with pytest.raises(ValueError, match="33 stop strings after merging"):
        merge_stop_strings([f"s{i}" for i in range(20)], [f"t{i}" for i in range(13)])


def test_stops_that_the_pinned_dynamo_does_not_take_are_warned_of(load):
    allowed = load(f"G.stop_strings={MANY[:-5]}]", "G.stop_token_ids=[1,2,3,4,5]")
    assert len(allowed.policy.generation.stop_strings) == 32
    strings, ids, caution = allowed.warnings()
    assert strings.startswith("policy.generation.stop_strings=")
    assert ids.startswith("policy.generation.stop_token_ids=[1, 2, 3, 4, 5]: ")
    assert "500 beyond 4" in strings
    assert "500 beyond 4" in ids
    assert "use stop_token_ids" in caution


def test_data_of_a_file(load, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert load(f"data.dataset_name={path}").data.dataset_name == str(path)

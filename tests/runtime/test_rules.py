"""Recipes that break a rule, each with the key path its error names and a part of what it says."""

import json
import os

import pytest

from functional.runtime.errors import ConfigError
from functional.runtime.recipe import rules
from functional.runtime.recipe.load import RecipeError
from functional.runtime.recipe.rules import find_warnings, merge_stop_strings
from tests.recipes import expand

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
    ("G.vllm_cfg.tensor_parallel_size=0", "G.vllm_cfg.tensor_parallel_size", "greater than"),
    ("G.vllm_cfg.tensor_parallel_size=two", "G.vllm_cfg.tensor_parallel_size", "integer"),
    ("G.vllm_cfg.expert_parallel_size=2", "G.vllm_cfg.expert_parallel_size", "must be 1 or"),
    ("G.vllm_cfg.data_parallel_size=2", "G.vllm_cfg.data_parallel_size", "managed"),
    ("G.vllm_kwargs.data_parallel_size=2", "G.vllm_kwargs.data_parallel_size", "managed"),
    ("G.vllm_cfg.prefill_context_parallel_size=2", "G.vllm_cfg.prefill_context_parallel_size", "context parallel"),
    ("G.vllm_kwargs.prefill_context_parallel_size=2", "G.vllm_kwargs.prefill_context_parallel_size", "context"),
    ("G.vllm_cfg.decode_context_parallel_size=4", "G.vllm_cfg.decode_context_parallel_size", "context parallel"),
    ("G.vllm_kwargs.decode_context_parallel_size=4", "G.vllm_kwargs.decode_context_parallel_size", "context"),
    ("G.vllm_kwargs.data_parallel_rank=1", "G.vllm_kwargs.data_parallel_rank", "managed"),
    ("G.vllm_kwargs.nnodes=2", "G.vllm_kwargs.nnodes", "one node"),
    ("G.colocated.enabled=true", "G.colocated.enabled", "never colocated"),
    ("G.colocated.resources.gpus_per_node=8", "cluster.gpus_per_node", "need 9"),
    ("cluster.share_gpu=true", "cluster.share_gpu", "is for cluster.device=cuda"),
    # what the managed runtime does not have
    ("G.vllm_kwargs.speculative_config={method: ngram}", "G.vllm_kwargs.speculative_config", "speculative"),
    ("G.vllm_cfg.speculative_config={method: mtp}", "G.vllm_cfg.speculative_config", "speculative"),
    ("G.speculative_config={method: mtp}", "G.speculative_config", "speculative"),
    ("G.vllm_kwargs.spec_model=draft", "G.vllm_kwargs.spec_model", "speculative"),
    ("G.sglang_cfg={tp_size: 1}", "G.sglang_cfg", "another engine"),
    ("G.trtllm_cfg={tp: 1}", "G.trtllm_cfg", "another engine"),
    ("G.refit_transport=nixl", "G.refit_transport", "collective"),
    ("G.backend=vllm", "G.backend", "dynamo"),
    ("G.dynamo_cfg.engine=sglang", "G.dynamo_cfg.engine", "vllm"),
    ("G.vllm_kwargs.kv_transfer_config={kv_connector: x}", "G.vllm_kwargs.kv_transfer_config", "aggregated"),
    # sampling
    ("G.top_p=0", "G.top_p", "above 0"),
    ("G.top_k=0", "G.top_k", "from 1"),
    ("G.temperature=0", "G.temperature", "from 0.01 to 2"),
    ("G.temperature=0.009", "G.temperature", "from 0.01 to 2"),
    ("G.temperature=2.01", "G.temperature", "from 0.01 to 2"),
    ("G.temperature=.nan", "G.temperature", "from 0.01 to 2"),
    ("G.temperature=null", "G.temperature", "from 0.01 to 2"),
    ("G.stop_token_ids=[true]", "G.stop_token_ids.0", "valid integer"),
    ("G.stop_token_ids=[4294967296]", "G.stop_token_ids.0", "less than"),
    ("G.stop_token_ids=[2,-1]", "G.stop_token_ids.1", "greater than or equal to 0"),
    ("G.min_p=0.1", "G.min_p", "own distribution"),
    ("G.repetition_penalty=1.05", "G.repetition_penalty", "own distribution"),
    ("G.presence_penalty=-0.5", "G.presence_penalty", "own distribution"),
    ("G.frequency_penalty=0.5", "G.frequency_penalty", "own distribution"),
    ("G.min_tokens=3", "G.min_tokens", "own distribution"),
    ("G.logit_bias={5: 1.0}", "G.logit_bias", "own distribution"),
    ("G.seed=0", "G.seed", "set grpo.seed"),
    ("G.vllm_kwargs.generation_config=auto", "G.vllm_kwargs.generation_config", "nothing else sets top-p"),
    ("G.vllm_cfg.generation_config=/models/x", "G.vllm_cfg.generation_config", "nothing else sets top-p"),
    (
        "G.vllm_kwargs.override_generation_config={top_p: 0.8}",
        "G.vllm_kwargs.override_generation_config",
        "nothing else sets top-p",
    ),
    (
        "G.vllm_cfg.override_generation_config={top_p: 0.8}",
        "G.vllm_cfg.override_generation_config",
        "nothing else sets top-p",
    ),
    ("G.vllm_kwargs.logits_processors=[a.B]", "G.vllm_kwargs.logits_processors", "alters what is sampled"),
    (f"{W}.extra_cli_args=[--generation-config,auto]", f"{W}.extra_cli_args", "nothing else sets top-p"),
    (f"{W}.extra_cli_args=[--generation-conf=auto]", f"{W}.extra_cli_args", "nothing else sets top-p"),
    (f"{W}.extra_cli_args=[--override-generation-config.top_p,'0.8']", f"{W}.extra_cli_args", "sets top-p"),
    (f"{W}.extra_cli_args=['--override_generation_config={{}}']", f"{W}.extra_cli_args", "sets top-p"),
    (f"{W}.extra_cli_args=[--logits-processors,a.B]", f"{W}.extra_cli_args", "alters what is sampled"),
    # seeds
    ("G.vllm_kwargs.seed=0", "G.vllm_kwargs.seed", "moved, set grpo.seed"),
    ("G.vllm_cfg.seed=1", "G.vllm_cfg.seed", "moved, set grpo.seed"),
    (f"{W}.extra_cli_args=[--seed=1]", f"{W}.extra_cli_args", "set it by grpo.seed"),
    # the loss
    (
        "loss_fn.use_importance_sampling_correction=false",
        "loss_fn.truncated_importance_sampling_ratio",
        "use_importance_sampling_correction to true",
    ),
    (
        "loss_fn={use_importance_sampling_correction: false, truncated_importance_sampling_type: tis,"
        " truncated_importance_sampling_ratio: null}",
        "loss_fn.truncated_importance_sampling_type",
        "has no effect",
    ),
    ("loss_fn.truncated_importance_sampling_type=ice", "loss_fn.truncated_importance_sampling_type", "icepop"),
    ("loss_fn.truncated_importance_sampling_type=icepop", "loss_fn.truncated_importance_sampling_type", "both bounds"),
    (
        "loss_fn={truncated_importance_sampling_type: seq-mask-tis, truncated_importance_sampling_ratio: null,"
        " truncated_importance_sampling_ratio_min: null}",
        "loss_fn.truncated_importance_sampling_type",
        "set loss_fn.truncated_importance_sampling_ratio",
    ),
    (
        "loss_fn={truncated_importance_sampling_type: icepop, truncated_importance_sampling_ratio: 2,"
        " truncated_importance_sampling_ratio_min: 3}",
        "loss_fn.truncated_importance_sampling_ratio_min",
        "is above",
    ),
    # generation beside training
    (
        "grpo.async_grpo.enabled=true loss_fn={use_importance_sampling_correction: false,"
        " truncated_importance_sampling_ratio: null}",
        "grpo.async_grpo.enabled",
        "use_importance_sampling_correction",
    ),
    ("grpo.async_grpo.max_trajectory_age_steps=0", "grpo.async_grpo.max_trajectory_age_steps", "greater than"),
    ("loss_fn.truncated_importance_sampling_ratio=0", "loss_fn.truncated_importance_sampling_ratio", "greater than 0"),
    ("loss_fn.truncated_importance_sampling_ratio_min=0.5", "loss_fn.truncated_importance_sampling_ratio_min", "null"),
    ("loss_fn.ratio_clip_c=3", "loss_fn.ratio_clip_c", "remove it, or set null"),
    ("loss_fn.use_cispo=true", "loss_fn.use_cispo", "remove it, or set false"),
    ("loss_fn.sequence_level_importance_ratios=true", "loss_fn.sequence_level_importance_ratios", "does not do"),
    ("loss_fn.disable_ppo_ratio=true", "loss_fn.disable_ppo_ratio", "does not do"),
    ("loss_fn.use_kl_in_reward=true", "loss_fn.use_kl_in_reward", "does not do"),
    ("loss_fn.use_on_policy_kl_approximation=true", "loss_fn.use_on_policy_kl_approximation", "does not do"),
    ("loss_fn.reference_policy_kl_type=k4", "loss_fn.reference_policy_kl_type", "k3"),
    ("loss_fn.kl_input_clamp_value=-1", "loss_fn.kl_input_clamp_value", "greater than 0"),
    ("loss_fn.ratio_clip_mim=0.2", "loss_fn.ratio_clip_mim", "nearest known key is ratio_clip_min"),
    ("loss_fn.ratio_clip_min=.inf", "loss_fn.ratio_clip_min", "finite"),
    ("policy.optimizer.lr=.inf", "policy.optimizer.lr", "finite"),
    # metrics
    (
        "G.vllm_cfg.vllm_metrics_logger_interval=0.5 G.dynamo_cfg.metrics_interval_s=5",
        "G.vllm_cfg.vllm_metrics_logger_interval",
        "metrics_interval_s=5 says otherwise",
    ),
    ("G.vllm_cfg.vllm_metrics_logger_interval=0", "G.vllm_cfg.vllm_metrics_logger_interval", "greater than 0"),
    ("G.vllm_kwargs.vllm_metrics_logger_interval=3", "G.vllm_kwargs.vllm_metrics_logger_interval", "moved"),
    ("G.vllm_kwargs.enable_vllm_metrics_logger=false", "G.vllm_kwargs.enable_vllm_metrics_logger", "moved"),
    ("G.vllm_cfg.enable_vllm_metrics_logger=sometimes", "G.vllm_cfg.enable_vllm_metrics_logger", "boolean"),
    # models
    ("policy.model_name=/nowhere", "policy.model_name", "no such folder"),
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
    (f"{W}.extra_cli_args=[--no-enable-prefix-caching]", f"{W}.extra_cli_args", "set it by"),
    (f"{W}.extra_cli_args=[--quantization,fp8]", f"{W}.extra_cli_args", "unsupported"),
    (f"{W}.extra_cli_args=[--speculative-config.method,ngram]", f"{W}.extra_cli_args", "unsupported"),
    (f"{W}.extra_cli_args=[--dyn-tool-call-parser,hermes]", f"{W}.extra_cli_args", "worker_args.tool_call_parser"),
    (f"{W}.extra_cli_args=[--data-parallel-size,'2']", f"{W}.extra_cli_args", "managed"),
    (f"{W}.extra_cli_args=[-tp,'2']", f"{W}.extra_cli_args", "long name"),
    (f"{W}.extra_cli_args=[--,x]", f"{W}.extra_cli_args", "long name"),
    (f"{W}.extra_cli_args=[stray]", f"{W}.extra_cli_args", "belongs to no flag"),
    (f"{W}.extra_cli_args=[--max-logprobs,'1',stray]", f"{W}.extra_cli_args", "belongs to no flag"),
    (f"{W}.extra_cli_args=[--max-logprobs=1,stray]", f"{W}.extra_cli_args", "belongs to no flag"),
    (f"{W}.extra_cli_args=[--async-scheduling,stray]", f"{W}.extra_cli_args", "belongs to no flag"),
    (f"{W}.extra_cli_args=[--max-logprobs,'1',--max-logprobs=2]", f"{W}.extra_cli_args", "twice"),
    (f"{W}.extra_cli_args=[--async-scheduling,--no-async-scheduling]", f"{W}.extra_cli_args", "twice"),
    (f"{W}.extra_cli_args=[--config,flags.yaml]", f"{W}.extra_cli_args", "escape"),
    (f"{W}.extra_cli_args=[--config=flags.yaml]", f"{W}.extra_cli_args", "escape"),
    (f"{W}.extra_cli_args=[--max-logprobz,'1']", f"{W}.extra_cli_args", "nearest is --max-logprobs"),
    (f"{W}.extra_cli_args=--max-logprobs", f"{W}.extra_cli_args", "list"),
    (f"{W}.endpoint_types=[chat, chat]", f"{W}.endpoint_types", "names one twice"),
    (f"{W}.endpoint_types=[]", f"{W}.endpoint_types", "at least 1"),
    ("G.vllm_cfg.load_format=gguf", "G.vllm_cfg.load_format", "quantization"),
    ("G.vllm_cfg.load_format=quick", "G.vllm_cfg.load_format", "vLLM 0.23.0 has"),
    ("policy.scheduler={stages: []}", "policy.scheduler.stages", "at least"),
    ("grpo.val_period=1", "grpo.val_period", "nothing to validate on"),
    (f"G.vllm_cfg.expose_http_server=true {F}.router_mode=direct", f"{F}.router_mode", "name no worker"),
    ("data={validation: {dataset_name: token_set}}", "data.validation.dataset_name", "rewarded otherwise"),
    ("data={validation: {dataset_name: none.jsonl}}", "data.validation.dataset_name", "no such file"),
    ("grpo={stop_at_validation_metric: accuracy}", "grpo.stop_at_validation_metric", "threshold too"),
    ("checkpointing={enabled: true, model_save_format: torch_save}", "checkpointing.model_save_format", "safetensors"),
    ("checkpointing={enabled: true, metric_name: a}", "checkpointing.metric_name", "begins with"),
    ("checkpointing.save_perio=1", "checkpointing.save_perio", "nearest known key is save_period"),
    ("grpo={advantage_clip_low: 2, advantage_clip_high: 1}", "grpo.advantage_clip_low", "above"),
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
    ("G.vllm_cfg.env_vars.PROMETHEUS_MULTIPROC_DIR=/x", "G.vllm_cfg.env_vars.PROMETHEUS_MULTIPROC_DIR", "managed"),
    ("G.vllm_cfg.env_vars.DYNAMO_VENV=/x", "G.vllm_cfg.env_vars.DYNAMO_VENV", "DYNAMO_*"),
    ("G.vllm_cfg.env_vars.PYTHONPATH=/x", "G.vllm_cfg.env_vars.PYTHONPATH", "PYTHON*"),
    ("G.vllm_cfg.env_vars.A=true", "G.vllm_cfg.env_vars.A", "string"),
    ("G.vllm_cfg.env_vars={'A B': x}", "G.vllm_cfg.env_vars.A B", "no name"),
    # data, misspelt keys
    ("data.dataset_name=OpenMathInstruct-2", "data.dataset_name", "local .jsonl"),
    ("data.dataset_name=/nowhere.jsonl", "data.dataset_name", "no such file"),
    ("grpo.max_num_step=3", "grpo.max_num_step", "nearest known key is max_num_steps"),
    ("G.max_new_token=3", "G.max_new_token", "nearest known key is max_new_tokens"),
    ("G.dynamo_cfg.startup_timeout=3", "G.dynamo_cfg.startup_timeout", "startup_timeout_s"),
    ("G.dynamo_cfg.max_inflight_requests=0", "G.dynamo_cfg.max_inflight_requests", "greater than or equal to 1"),
    ("G.dynamo_cfg.startup_timeout_s=0", "G.dynamo_cfg.startup_timeout_s", "greater than 0"),
]

ACCEPTED = [
    "G.colocated.resources.gpus_per_node=null",
    "G.vllm_cfg.precision=bf16 G.vllm_cfg.env_vars=null G.vllm_cfg.load_format=safetensors",
    "G.vllm_kwargs.enable_prefix_caching=true",
    "G.top_p=0.95 G.top_k=50",
    "G.top_k=-1",
    "G.dynamo_cfg.metrics_include_prefixes=[a] G.dynamo_cfg.metrics_exclude_prefixes=[b]",
    "G.mcore_generation_config={max_tokens: 1} G.max_new_tokens=128",
    "loss_fn.force_on_policy_ratio=true loss_fn.reference_policy_kl_type=k1 loss_fn.kl_input_clamp_value=20",
    "G.temperature=2",
    "G.temperature=0.01",
    "G.min_p=0 G.repetition_penalty=1.0 G.presence_penalty=0.0 G.logit_bias=null G.seed=null",
    "G.vllm_kwargs.generation_config=vllm G.vllm_kwargs.override_generation_config={}",
    "loss_fn={use_importance_sampling_correction: false, truncated_importance_sampling_ratio: null}",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn={truncated_importance_sampling_type: seq-mask-tis, truncated_importance_sampling_ratio: 1.002,"
    " truncated_importance_sampling_ratio_min: 0.999}",
    "loss_fn={truncated_importance_sampling_type: icepop, truncated_importance_sampling_ratio: 5,"
    " truncated_importance_sampling_ratio_min: 0.5}",
    "grpo.async_grpo={enabled: true, in_flight_weight_updates: true}",
    "loss_fn={ratio_clip_c: null, use_cispo: false, reference_policy_kl_type: k3, kl_input_clamp_value: null}",
    "G.vllm_cfg.vllm_metrics_logger_interval=0.5 G.dynamo_cfg.metrics_interval_s=0.5",
    "G.vllm_cfg.enable_vllm_metrics_logger=false G.vllm_cfg.vllm_metrics_logger_interval=1.0",
    "G.vllm_cfg.data_parallel_size=1 G.vllm_kwargs.decode_context_parallel_size=1",
    "G.vllm_cfg.logprobs_mode=processed_logprobs",
    "G.vllm_cfg.async_engine=true G.vllm_cfg.use_tqdm=true G.vllm_cfg.use_deep_gemm=false",
    "G.vllm_cfg.num_last_layers_in_bf16=0 G.vllm_cfg.is_mx=false G.vllm_cfg.http_refit_server_port=null",
    "G.vllm_cfg.expose_http_server=true G.vllm_cfg.vllm_metrics_logger_interval=0.5",
    "G.vllm_kwargs.compilation_config={cudagraph_mode: NONE} G.vllm_kwargs.moe_backend=triton",
    "G.vllm_cfg.tool_parser_plugin=null G.vllm_kwargs.speculative_config=null",
    "G.mcore_generation_config=null G.refit_transport=null G.real_quant=false G.port_range_low=3000",
    "G.max_new_tokens=128",  # the whole context: max_tokens is cut to what a prompt leaves
    "G.stop_token_ids=[1,2,3,4]",
    f"{W}.extra_cli_args=[--max-logprobs,'-1',--async-scheduling,--compilation-config.mode,'0']",
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
    """`key=value` parts; a space before `G.` or `loss_fn=` starts the next."""
    parts = overrides.replace(" loss_fn=", " G.\0").split(" G.")
    return [parts[0], *("loss_fn=" + part[1:] if part.startswith("\0") else "G." + part for part in parts[1:])]


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


CAUTIONED = [
    ("G.vllm_kwargs.enable_prefix_caching=false", "that check is skipped"),
    ("G.vllm_cfg.enable_prefix_caching=false", "that check is skipped"),
    (f"{W}.endpoint_types=[chat]", "it is served too"),
    ("grpo.async_grpo={enabled: true, recompute_kv_cache_after_weight_updates: false}", "caches are cleared"),
    ("grpo.async_grpo={enabled: true, max_generation_failures: 3}", "no sample is dropped"),
]


@pytest.mark.parametrize(("override", "words"), CAUTIONED)
def test_accepted_with_a_word_of_what_it_means_here(load, override, words):
    (warning,) = find_warnings(load(override))
    assert words in warning


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_accepted(load, overrides):
    assert find_warnings(load(*split(overrides))) == []


@pytest.mark.parametrize(
    ("rule", "overrides", "key", "message"),
    [
        (rules._group_fits, "G.vllm_cfg.tensor_parallel_size=8", "tensor_parallel_size", "fit on one node"),
        (
            rules._group_fits,
            "G.vllm_cfg.tensor_parallel_size=4 G.vllm_cfg.pipeline_parallel_size=2",
            "tensor_parallel_size",
            "takes 8 devices",
        ),
        (rules._group_fits, "G.vllm_cfg.tensor_parallel_size=3", "gpus_per_node", "do not divide"),
        (
            rules._expert_group,
            "G.vllm_cfg.tensor_parallel_size=4 G.vllm_cfg.expert_parallel_size=2",
            "expert_parallel_size",
            "must be 1 or tensor_parallel_size, 4",
        ),
    ],
)
def test_groups_of_several_ranks(read, rule, overrides, key, message):
    (problem,) = rule(read(*split(overrides)))
    assert problem.key.endswith(f".{key}")
    assert message in problem.message


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
    strings, ids, caution = find_warnings(allowed)
    assert strings.startswith("policy.generation.stop_strings=")
    assert ids.startswith("policy.generation.stop_token_ids=[1, 2, 3, 4, 5]: ")
    assert "500 beyond 4" in strings
    assert "500 beyond 4" in ids
    assert "use stop_token_ids" in caution


CHAT = "G.vllm_cfg.expose_http_server=true"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("data.dataset_name=tool_arithmetic", "data.dataset_name"),
        (f"{CHAT} {W}.endpoint_types=[completions]", f"{W}.endpoint_types"),
        (f"{CHAT} G.dynamo_cfg.chat_host=0.0.0.0", "G.dynamo_cfg.chat_host"),
        (f"{CHAT} G.dynamo_cfg.chat_host=::", "G.dynamo_cfg.chat_host"),
        (f"{CHAT} G.dynamo_cfg.chat_host=localhost", "G.dynamo_cfg.chat_host"),
        (f"{CHAT} G.dynamo_cfg.chat_port=70000", "G.dynamo_cfg.chat_port"),
        ("G.vllm_cfg.expose_http_server=please", "G.vllm_cfg.expose_http_server"),
    ],
)
def test_what_a_chat_server_cannot_be_is_refused(load, overrides, key):
    with pytest.raises(ConfigError) as refused:
        load(*split(overrides))
    assert [problem.key for problem in refused.value.problems] == [expand(key)]


def test_a_chat_server_that_others_reach_and_a_parser_that_loses_token_data_are_warned_of(load):
    assert find_warnings(load(CHAT, f"{W}.tool_call_parser=qwen3_coder")) == []
    assert find_warnings(load(CHAT, f"{W}.tool_call_parser=deepseek_v4")) == []
    assert find_warnings(load(f"{W}.tool_call_parser=hermes")) == []
    parser, host = find_warnings(load(CHAT, f"{W}.tool_call_parser=hermes", "G.dynamo_cfg.chat_host=10.0.0.7"))
    assert parser.startswith("policy.generation.dynamo_cfg.worker_args.tool_call_parser='hermes': ")
    assert "may drop engine_data" in parser
    assert "qwen3_coder" in parser
    assert "no credentials" in host


def test_normalising_what_has_no_deviation_is_warned_of(load):
    (caution,) = find_warnings(load("grpo.num_generations_per_prompt=2"))
    assert caution.startswith("grpo.normalize_rewards=True: has no effect")
    assert find_warnings(load("grpo.num_generations_per_prompt=2", "grpo.use_leave_one_out_baseline=false")) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"architectures": ["Qwen3ForCausalLM"]}', None),
        ('{"architectures": ["Qwen3MoeForCausalLM"]}', None),
        ('{"architectures": []}', "architecture None was never trained and proved"),
        ("[]", "architecture None was never trained and proved"),
        ("not json", "cannot be read"),
        (None, "holds no config.json"),
        ('{"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"bits": 4}}', "quantized"),
        ('{"architectures": ["Qwen3ForCausalLM"], "compression_config": {"bits": 4}}', "quantized"),
        ('{"architectures": [["Qwen3ForCausalLM"]]}', "was never trained and proved"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_models_that_have_no_proof(load, tmp_path, config, message):
    folder = tmp_path / "model"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    if message is None:
        load(f"policy.model_name={folder}")
        return
    with pytest.raises(RecipeError, match=message) as caught:
        load(f"policy.model_name={folder}")
    assert [problem.key for problem in caught.value.problems] == ["policy.model_name"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", '{"eos_token_id": [2, 0], "top_p": 0.8, "max_new_tokens": 1}', None),
        ("generation_config.json", "{", "its generation_config.json cannot be read"),
        ("generation_config.json", "[2]", "no JSON object"),
        ("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}', "quantized"),
    ],
)
def test_what_stands_beside_a_model_s_configuration(load, tmp_path, name, content, message):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / name).write_text(content)
    if message is None:
        load(f"policy.model_name={tmp_path}")
        return
    with pytest.raises(RecipeError, match=message) as caught:
        load(f"policy.model_name={tmp_path}")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", ["a" * 5000, "nul\0inside", "~no-such-user/a", "../" * 2000 + "a"])
@pytest.mark.parametrize("key", ["policy.model_name", "data.dataset_name", f"{W}.custom_jinja_template"])
def test_no_path_is_too_odd_to_be_refused_in_one_line(recipe_path, tmp_path, key, name):
    from functional.suite.preflight import prepare

    parts = key.replace("G.", "policy.generation.", 1).split(".") if key.startswith("G.") else key.split(".")
    value = f"/{name}" if parts[-1] == "model_name" else f"{name}.jsonl"
    odd = {"defaults": recipe_path.name} | nested(parts, value)
    (tmp_path / "odd.yaml").write_text(json.dumps(odd))
    with pytest.raises(RecipeError, match="no such f") as caught:
        prepare(tmp_path / "odd.yaml", [])
    assert [problem.key for problem in caught.value.problems] == [".".join(parts)]


def nested(parts, value):
    return {parts[0]: nested(parts[1:], value) if parts[1:] else value}


def test_what_is_there_but_no_file_is_said_as_such(load, tmp_path):
    folder, pipe = tmp_path / "folder.jsonl", tmp_path / "pipe.jsonl"
    folder.mkdir()
    os.mkfifo(pipe)
    for path, message in ((folder, "is a folder"), (pipe, "is no plain file")):
        with pytest.raises(RecipeError, match=message):
            load(f"data.dataset_name={path}")


def test_data_of_a_file(load, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert load(f"data.dataset_name={path}").data.dataset_name == str(path)

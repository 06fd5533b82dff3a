"""The class of each option, and the command lines that come of them."""

import json
import pickle
from pathlib import Path

import pytest

from functional.runtime.recipe import argv, model, options
from functional.runtime.recipe.argv import WorkerPlace, frontend_arguments, worker_arguments
from functional.runtime.recipe.environment import frontend_variables
from functional.runtime.recipe.load import load_recipe
from functional.runtime.recipe.options import shown_options
from functional.runtime.recipe.rules import find_warnings

PLACE = WorkerPlace(Path("/model"), "ns", Path("/run/kv0"), 7)

CLASSES = [
    ("vllm_cfg.tensor_parallel_size", 2, "translated", "--tensor-parallel-size 2"),
    ("vllm_cfg.pipeline_parallel_size", 2, "translated", "--pipeline-parallel-size 2"),
    ("vllm_cfg.precision", "bfloat16", "translated", "--dtype bfloat16"),
    ("vllm_cfg.kv_cache_dtype", "auto", "translated", "--kv-cache-dtype auto"),
    ("vllm_cfg.max_model_len", 256, "translated", "--max-model-len 256"),
    ("vllm_cfg.load_format", "auto", "translated", "--load-format auto"),
    ("vllm_cfg.enforce_eager", "false", "translated", "--no-enforce-eager"),
    ("vllm_cfg.env_vars", "{A: b}", "translated", "environment of every worker"),
    ("vllm_cfg.gpu_memory_utilization", 0.5, "inapplicable", "VLLM_CPU_KVCACHE_SPACE"),
    ("vllm_cfg.async_engine", "true", "inapplicable", "always"),
    ("vllm_cfg.use_tqdm", "true", "inapplicable", "progress"),
    ("vllm_cfg.http_refit_server_port", 8000, "inapplicable", "collective"),
    ("vllm_cfg.expose_http_server", "true", "managed", "serves chat at dynamo_cfg.chat_host"),
    ("vllm_cfg.enable_vllm_metrics_logger", "true", "managed", "metrics"),
    ("vllm_cfg.enable_vllm_metrics_logger", "false", "managed", "reads them once"),
    ("vllm_cfg.vllm_metrics_logger_interval", 0.5, "managed", "metrics_interval_s"),
    ("vllm_cfg.logprobs_mode", "processed_logprobs", "managed", "--enable-rl"),
    ("vllm_cfg.skip_tokenizer_init", "true", "unsupported", "tokenizer"),
    ("vllm_cfg.cap_max_tokens_to_context", "true", "managed", "always cut"),
    ("vllm_cfg.enable_return_routed_experts", "true", "unsupported", "routes"),
    ("vllm_cfg.use_deep_gemm", "false", "unsupported", "low-precision"),
    ("vllm_cfg.num_last_layers_in_bf16", 0, "unsupported", "low-precision"),
    ("vllm_cfg.tool_parser_plugin", "null", "moved", "worker_args.tool_call_parser"),
    ("vllm_cfg.tensor_paralel_size", 2, "unknown", "nearest known key is tensor_parallel_size"),
    ("vllm_cfg.zzz", 2, "unknown", "ignored"),
    ("vllm_kwargs.max_num_seqs", 16, "translated", "--max-num-seqs 16"),
    ("vllm_kwargs.block_size", 32, "translated", "--block-size 32"),
    ("vllm_kwargs.enable_chunked_prefill", "false", "translated", "--no-enable-chunked-prefill"),
    ("vllm_kwargs.cudagraph_capture_sizes", "[1,2]", "translated", "--cudagraph-capture-sizes 1 2"),
    ("vllm_kwargs.compilation_config", "{mode: 0}", "translated", '--compilation-config {"mode": 0}'),
    ("vllm_kwargs.video_pruning_rate", -1, "translated", "--video-pruning-rate=-1"),
    ("vllm_kwargs.generation_config", "vllm", "managed", "neutral"),
    ("vllm_kwargs.seed", "null", "moved", "grpo.seed"),
    ("vllm_kwargs.attention_backend", "null", "translated", "the engine's default"),
    ("vllm_kwargs.enable_lora", "true", "unsupported", "adapters"),
    ("vllm_kwargs.disable_log_stats", "true", "inapplicable", "statistics"),
    ("vllm_kwargs.logprobs_mode", "processed_logprobs", "managed", "processed"),
    ("vllm_kwargs.max_num_seq", 3, "unknown", "nearest known key is max_num_seqs"),
]


@pytest.mark.parametrize(("key", "value", "kind", "outcome"), CLASSES)
def test_class_of_an_option(read, key, value, kind, outcome):
    recipe = read(f"G.{key}={value}")
    option = {o.path: o for o in recipe.options}[f"policy.generation.{key}"]
    assert option.kind == kind
    assert outcome in option.outcome
    asked = str(value) not in ("false", "0", "null")
    assert bool(find_warnings(recipe)) == (kind == "unknown" or (kind == "unsupported" and asked))


def test_every_class_occurs():
    assert {kind for _, _, kind, _ in CLASSES} == set(options.OptionClass) - {options.OptionClass.USED}


def test_expert_parallel_size_is_a_flag_when_it_is_the_tensor_group(read):
    recipe = read("G.vllm_cfg.tensor_parallel_size=4", "G.vllm_cfg.expert_parallel_size=4")
    assert "--enable-expert-parallel" in worker_arguments(recipe, PLACE)


def test_the_gpu_share_is_a_flag_on_cuda(load):
    words = worker_arguments(load("cluster.device=cuda"), PLACE)
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.6"


@pytest.mark.parametrize(("device", "name", "backend"), [("cpu", "gloo", "gloo"), ("cuda", "nccl", "nccl_deadline")])
def test_trainer_and_engine_use_the_devices_transport(load, device, name, backend):
    recipe = load(f"cluster.device={device}")
    words = worker_arguments(recipe, PLACE)
    assert recipe.transport.name == name
    assert json.loads(words[words.index("--weight-transfer-config") + 1]) == {"backend": backend}


def test_worker_args_become_flags_and_extras_come_last(load):
    own = "G.dynamo_cfg.worker_args"
    words = worker_arguments(
        load(
            f"{own}.tool_call_parser=hermes",
            f"{own}.exclude_tools_when_tool_choice_none=false",
            f"{own}.enable_structural_tag=true",
            f"{own}.endpoint_types=[completions]",
            f"{own}.extra_cli_args=[--max-logprobs,7]",
        ),
        PLACE,
    )
    assert words[-2:] == ["--max-logprobs", "7"]
    assert words[words.index("--dyn-tool-call-parser") + 1] == "hermes"
    assert words[words.index("--endpoint-types") + 1] == "completions"
    assert {"--no-exclude-tools-when-tool-choice-none", "--dyn-enable-structural-tag"} <= set(words)


def test_no_flag_is_given_twice(load):
    words = worker_arguments(load("G.vllm_kwargs.max_logprobs=1", "cluster.device=cuda"), PLACE)
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))


def test_an_engine_has_its_own_seed_and_no_sampling_defaults_of_the_model(load):
    words = worker_arguments(load(), PLACE)
    assert words[words.index("--seed") + 1] == "7"
    assert words[words.index("--generation-config") + 1] == "vllm"


def test_the_policy_is_served_by_the_name_that_the_recipe_gives_it(load):
    words = worker_arguments(load("policy.model_name=Qwen/Qwen3-0.6B"), PLACE)
    assert words[words.index("--served-model-name") + 1] == "Qwen/Qwen3-0.6B"


def test_frontend_args_become_flags_and_variables(load):
    arguments = load(
        "G.dynamo_cfg.frontend_args.router_mode=random",
        "G.dynamo_cfg.frontend_args.router_reset_states=false",
        "G.dynamo_cfg.frontend_args.tokenizer_cache=true",
        "G.dynamo_cfg.frontend_args.tokenizer_cache_bytes=1000",
        "G.dynamo_cfg.frontend_args.extra_cli_args=[--router-temperature=0.5]",
    ).policy.generation.dynamo_cfg.frontend_args
    words = frontend_arguments(arguments, "127.0.0.1", 20000, "ns")
    assert words[words.index("--router-mode") + 1] == "random"
    assert words[-1] == "--router-temperature=0.5"
    assert "--no-router-reset-states" in words
    cache = {"DYN_TOKENIZER_CACHE": "1", "DYN_TOKENIZER_CACHE_BYTES": "1000"}
    ports = {"DYN_TCP_RESPONSE_STREAM_PORT": "20001", "DYN_SYSTEM_PORT": "20002"}
    assert frontend_variables(arguments, 20001, 20002) == ports | cache
    assert frontend_variables(load().policy.generation.dynamo_cfg.frontend_args, 20001, 20002) == ports


def test_shown_options_hold_no_secret(load):
    recipe = load("G.vllm_cfg.env_vars={HF_TOKEN: hunter2hunter2, PLAIN: kept}")
    shown = str(shown_options(recipe.options))
    assert "hunter2" not in shown
    assert "kept" in shown


def test_managed_flags_are_refused_everywhere(load):
    """Each flag the runtime sets itself is one that neither `vllm_kwargs` nor `extra_cli_args` may hold."""
    refusal = options.refusal_of_extra({})
    for word in argv._managed_flags("gloo", "model", PLACE):
        name = word[2:].replace("-", "_")
        assert refusal(name) is not None, name
        option = options._kwargs_option(name, "x")
        assert option.error is not None, name


def test_options_are_classified_once_a_load(recipe_path, monkeypatch):
    """Rules, warnings, the command line and what is shown all read the same options."""
    calls = []
    monkeypatch.setattr(model, "classify", lambda *sections: calls.append(sections) or options.classify(*sections))
    recipe = load_recipe(recipe_path)
    assert recipe.options is recipe.options
    assert find_warnings(recipe) == []
    assert worker_arguments(recipe, PLACE)
    assert len(shown_options(recipe.options)) == len(recipe.options) > 10
    assert pickle.loads(pickle.dumps(recipe)).options == recipe.options  # as Ray hands it to a worker's owner
    assert len(calls) == 1


def test_what_was_derived_from_a_recipe_is_no_part_of_it(recipe_path):
    recipe, other = load_recipe(recipe_path), load_recipe(recipe_path, rules=())
    assert "options" in vars(recipe)
    assert "options" not in vars(other)
    assert "options" not in recipe.model_dump()
    assert recipe == other

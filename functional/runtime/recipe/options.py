"""What becomes of each option in `vllm_cfg` and `vllm_kwargs`: its class, its flags, its warning or error.

Key names of `vllm_cfg` are those of NeMo RL's recipes; keys of `vllm_kwargs` are the engine's flags with underscores.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from functional.runtime.recipe.engine_flags import ENGINE_FLAGS, WORKER_FLAGS
from functional.runtime.recipe.flags import as_flags
from functional.runtime.recipe.redact import redacted

GENERATION = "policy.generation"
VLLM_CFG = f"{GENERATION}.vllm_cfg"
VLLM_KWARGS = f"{GENERATION}.vllm_kwargs"
WORKER_ARGS = f"{GENERATION}.dynamo_cfg.worker_args"


class OptionClass(StrEnum):
    USED = "used"
    TRANSLATED = "translated"
    MOVED = "moved"
    UNSUPPORTED = "unsupported"
    MANAGED = "managed"
    INAPPLICABLE = "inapplicable"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Option:
    """One option of a recipe. `flags`: the words it adds to `dynamo.vllm`'s command line."""

    path: str
    value: Any
    kind: OptionClass
    outcome: str
    flags: tuple[str, ...] = ()
    warning: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Rule:
    """A class with its reason. `refuse`: an active value is an error; `allowed`: values that are never active."""

    kind: OptionClass
    reason: str
    refuse: bool = False
    allowed: tuple[Any, ...] = (None, False, "", 0)


def moved(to: str) -> Rule:
    return Rule(OptionClass.MOVED, to, refuse=True, allowed=(None, ""))


def managed(reason: str, *also_allowed: Any) -> Rule:
    return Rule(OptionClass.MANAGED, reason, refuse=True, allowed=(None, *also_allowed))


def unsupported(reason: str, refuse: bool = False) -> Rule:
    return Rule(OptionClass.UNSUPPORTED, reason, refuse)


def inapplicable(reason: str) -> Rule:
    return Rule(OptionClass.INAPPLICABLE, reason)


LOW_PRECISION = "generation runs in bfloat16, no low-precision helper may be on"
NO_SPECULATION = "the managed runtime has no speculative decoding"
OTHER_PARALLELISM = "data and context parallel groups are not offered: engines multiply by colocated.resources"
METRICS = f"the runtime samples metrics, at this interval or {GENERATION}.dynamo_cfg.metrics_interval_s"
SAMPLING = (
    "what the recipe does not say is neutral: nothing else sets top-p, top-k or penalties, or alters what is sampled"
)
LOGPROBS = managed("--enable-rl makes log-probs processed; leave it unset or processed_logprobs", "processed_logprobs")
ONE_NODE = managed("an engine group stays on one node, placed by the runtime")
TOOL_PARSER = moved(f"{WORKER_ARGS}.tool_call_parser")
REASONING_PARSER = moved(f"{WORKER_ARGS}.reasoning_parser")

SHARED: dict[str, Rule] = {
    "data_parallel_size": managed(OTHER_PARALLELISM, 1),
    "prefill_context_parallel_size": managed(OTHER_PARALLELISM, 1),
    "decode_context_parallel_size": managed(OTHER_PARALLELISM, 1),
    "logprobs_mode": LOGPROBS,
    "skip_tokenizer_init": unsupported("dynamo.vllm needs the tokenizer and always loads it"),
    "enable_return_routed_experts": unsupported("expert routes are not returned through Dynamo"),
    "quantization": unsupported(LOW_PRECISION, refuse=True),
    "quantization_config": unsupported(LOW_PRECISION, refuse=True),
    "allow_deprecated_quantization": unsupported(LOW_PRECISION, refuse=True),
    "speculative_config": unsupported(NO_SPECULATION, refuse=True),
    "tool_call_parser": TOOL_PARSER,
    "tool_parser_plugin": TOOL_PARSER,
    "reasoning_parser": REASONING_PARSER,
    "reasoning_parser_plugin": REASONING_PARSER,
}
"""Rules of both sections."""

CFG: dict[str, Rule] = SHARED | {
    "http_server_serving_chat_kwargs": moved(f"{WORKER_ARGS} (tool_call_parser, reasoning_parser)"),
    "enable_expert_parallel": moved(f"{VLLM_CFG}.expert_parallel_size"),
    "is_mx": unsupported(LOW_PRECISION, refuse=True),
    "refit_prequantize": unsupported(LOW_PRECISION, refuse=True),
    "use_deep_gemm": unsupported(LOW_PRECISION, refuse=True),
    "num_last_layers_in_bf16": unsupported(LOW_PRECISION + ": all layers are", refuse=True),
    "num_first_layers_in_bf16": unsupported(LOW_PRECISION + ": all layers are", refuse=True),
    "cap_max_tokens_to_context": Rule(OptionClass.MANAGED, "max_tokens is always cut to what the prompt leaves"),
    "reset_encoder_cache_after_weight_update": unsupported("updates clear the prefix cache; encoders are not served"),
    "video": unsupported("rollouts are text"),
    "expose_http_server": Rule(OptionClass.MANAGED, "true: the runtime serves chat at dynamo_cfg.chat_host"),
    "enable_vllm_metrics_logger": Rule(
        OptionClass.MANAGED, "the runtime samples metrics, or with false reads them once"
    ),
    "vllm_metrics_logger_interval": Rule(OptionClass.MANAGED, METRICS),
    "async_engine": inapplicable("dynamo.vllm always runs the asynchronous engine"),
    "use_tqdm": inapplicable("workers print no progress bars"),
    "http_refit_server_port": inapplicable("refits use Dynamo's control routes and a collective"),
    "zmq_refit_server_port": inapplicable("refits use Dynamo's control routes and a collective"),
    "http_refit_api_key_env_var": inapplicable("refits use Dynamo's control routes and a collective"),
}
"""Rules of `vllm_cfg` beyond the fields that `VllmConfig` translates."""

PREFIX_CACHING = "enable_prefix_caching"
"""Of both sections. Off, no update can be seen to clear the cache, and there is none to clear."""

TRANSLATED = {
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "precision": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "max_model_len": "max_model_len",
    "load_format": "load_format",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "enforce_eager": "enforce_eager",
}
"""`vllm_cfg` keys and the engine's names for them."""

KWARGS: dict[str, Rule] = (
    SHARED
    | {flag: moved(f"{VLLM_CFG}.{key}") for key, flag in TRANSLATED.items()}
    | {
        "precision": moved(f"{VLLM_CFG}.precision"),
        "expert_parallel_size": moved(f"{VLLM_CFG}.expert_parallel_size"),
        "enable_expert_parallel": moved(f"{VLLM_CFG}.expert_parallel_size"),
        "env_vars": moved(f"{VLLM_CFG}.env_vars"),
        "enable_vllm_metrics_logger": moved(f"{VLLM_CFG}.enable_vllm_metrics_logger"),
        "vllm_metrics_logger_interval": moved(f"{VLLM_CFG}.vllm_metrics_logger_interval"),
        "config": unsupported("flags in a file would escape these rules", refuse=True),
        "hf_token": moved(f"{VLLM_CFG}.env_vars.HF_TOKEN: a command line is no place for a secret"),
        "chat_template": moved(f"{WORKER_ARGS}.custom_jinja_template"),
        "enable_auto_tool_choice": TOOL_PARSER,
        "dyn_tool_call_parser": TOOL_PARSER,
        "dyn_reasoning_parser": REASONING_PARSER,
        "custom_jinja_template": moved(f"{WORKER_ARGS}.custom_jinja_template"),
        "endpoint_types": moved(f"{WORKER_ARGS}.endpoint_types"),
        "dyn_endpoint_types": moved(f"{WORKER_ARGS}.endpoint_types"),
        "exclude_tools_when_tool_choice_none": moved(f"{WORKER_ARGS}.exclude_tools_when_tool_choice_none"),
        "dyn_enable_structural_tag": moved(f"{WORKER_ARGS}.enable_structural_tag"),
        "dyn_structural_tag_scope": moved(f"{WORKER_ARGS}.structural_tag_scope"),
        "dyn_structural_tag_schema": moved(f"{WORKER_ARGS}.structural_tag_schema"),
        "spec_method": unsupported(NO_SPECULATION, refuse=True),
        "spec_model": unsupported(NO_SPECULATION, refuse=True),
        "spec_tokens": unsupported(NO_SPECULATION, refuse=True),
        "calculate_kv_scales": unsupported(LOW_PRECISION, refuse=True),
        "kv_cache_dtype_skip_layers": unsupported(LOW_PRECISION, refuse=True),
        "override_attention_dtype": unsupported(LOW_PRECISION, refuse=True),
        "enable_lora": unsupported("updates send whole weights, not adapters"),
        "enable_sleep_mode": unsupported("workers are never put to sleep: they share no GPU with training"),
        "kv_transfer_config": unsupported("workers are aggregated: prefill and decode in one engine", refuse=True),
        "ec_transfer_config": unsupported("workers are aggregated: encoders are not served", refuse=True),
        "enable_elastic_ep": unsupported("the fleet is fixed", refuse=True),
        "disable_log_stats": inapplicable("dynamo.vllm always keeps statistics"),
        "enable_log_requests": inapplicable("dynamo.vllm logs requests itself"),
        "distributed_executor_backend": ONE_NODE,
        "master_addr": ONE_NODE,
        "master_port": ONE_NODE,
        "nnodes": managed("an engine group stays on one node", 1),
        "node_rank": managed("an engine group stays on one node", 0),
        "model": managed("set policy.model_name"),
        "served_model_name": managed("every worker serves the policy as policy.model_name"),
        "tokenizer": managed("trainer and engine use the model's own tokenizer"),
        "weight_transfer_config": managed("the runtime picks the transfer backend by device"),
        "worker_extension_cls": managed("the runtime's extension proves the weights"),
        "worker_cls": managed("the engine's own worker class is what the extension extends"),
        "kv_events_config": managed("the runtime gives each worker its own event socket"),
        "seed": moved("grpo.seed: each engine gets a seed of its own, made of it"),
        "generation_config": managed(SAMPLING, "vllm"),
        "override_generation_config": unsupported(SAMPLING, refuse=True),
        "logits_processors": unsupported(SAMPLING, refuse=True),
        "runner": managed("workers generate", "auto", "generate"),
        "convert": managed("workers generate", "auto", "none"),
    }
    | {name: managed(OTHER_PARALLELISM) for name in ENGINE_FLAGS if name.startswith("data_parallel_")}
    | {"data_parallel_size": managed(OTHER_PARALLELISM, 1)}
)
"""Rules of `vllm_kwargs`; a flag of the engine without one is translated."""

OPEN_WORKER_FLAGS = {"engine_request_limit", "health_check_payload"}
"""Flags of `dynamo.vllm` itself that a recipe may add in `extra_cli_args`."""
MANAGED_WORKER_FLAGS = {name for name in WORKER_FLAGS if name not in KWARGS and name not in OPEN_WORKER_FLAGS}
"""Flags of `dynamo.vllm` itself that are the runtime's: identity, planes, roles."""


def classify(
    vllm_cfg: Mapping[str, Any], vllm_kwargs: Mapping[str, Any], declared: Iterable[str], device: str
) -> tuple[Option, ...]:
    """Every option of the two sections, in their order.

    declared: the keys that `vllm_cfg`'s model names, for the hint at a misspelt one. device: cpu or cuda.
    """
    known = [*declared, *CFG, *ENGINE_FLAGS]
    cfg = [_cfg_option(key, value, known, device) for key, value in vllm_cfg.items()]
    return (*cfg, *(_kwargs_option(key, value) for key, value in vllm_kwargs.items()))


def shown_options(options: Iterable[Option]) -> list[dict[str, Any]]:
    """Options as plain data for printing and storing: secrets replaced."""
    shown = []
    for option in options:
        plain = asdict(option)
        plain["value"] = redacted(option.value, option.path.rpartition(".")[2])
        shown.append(plain | {"outcome": redacted(option.outcome), "flags": redacted(list(option.flags))})
    return shown


def _cfg_option(key: str, value: Any, known: Sequence[str], device: str) -> Option:
    path = f"{VLLM_CFG}.{key}"
    if key == "gpu_memory_utilization" and device == "cpu":
        outcome = "ignored: on CPU the runtime sets the cache's size (VLLM_CPU_KVCACHE_SPACE)"
        return Option(path, value, OptionClass.INAPPLICABLE, outcome)
    if key == "expert_parallel_size":
        flags = ("--enable-expert-parallel",) if value > 1 else ()
        return Option(path, value, OptionClass.TRANSLATED, " ".join(flags) or "no flag for 1", flags)
    if key == "env_vars":
        return Option(path, value, OptionClass.TRANSLATED, "environment of every worker")
    if key in TRANSLATED or key == PREFIX_CACHING:
        return _translated(path, TRANSLATED.get(key, key), value)
    if key in CFG:
        return _ruled(path, value, CFG[key])
    if key in ENGINE_FLAGS and key not in KWARGS:
        return _ruled(path, value, moved(f"{VLLM_KWARGS}.{key}"))
    if key in KWARGS:
        return _ruled(path, value, KWARGS[key])
    return _unknown(path, value, key, known)


def _kwargs_option(key: str, value: Any) -> Option:
    path = f"{VLLM_KWARGS}.{key}"
    if key in KWARGS:
        return _ruled(path, value, KWARGS[key])
    if key in ENGINE_FLAGS:
        return _translated(path, key, value)
    if key in MANAGED_WORKER_FLAGS:
        return _ruled(path, value, managed("a flag of dynamo.vllm that the runtime sets or leaves off"))
    if key in CFG:
        return _ruled(path, value, CFG[key])
    return _unknown(path, value, key, [*ENGINE_FLAGS, *KWARGS])


def _translated(path: str, flag: str, value: Any) -> Option:
    try:
        flags = as_flags(flag, value, ENGINE_FLAGS[flag])
    except ValueError as error:
        return Option(path, value, OptionClass.TRANSLATED, "no flag", error=str(error))
    return Option(path, value, OptionClass.TRANSLATED, " ".join(flags) or "no flag: the engine's default", flags)


def _ruled(path: str, value: Any, rule: Rule) -> Option:
    harmless = any(value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in rule.allowed)
    active = not harmless and value not in ({}, [])
    if rule.kind is OptionClass.MOVED:
        outcome = f"set {rule.reason}"
    elif rule.kind in (OptionClass.INAPPLICABLE, OptionClass.UNSUPPORTED):
        outcome = f"ignored: {rule.reason}"
    else:
        outcome = rule.reason
    if active and rule.refuse:
        error = f"moved, set {rule.reason}" if rule.kind is OptionClass.MOVED else f"{rule.kind}: {rule.reason}"
        return Option(path, value, rule.kind, outcome, error=error)
    warning = f"unsupported and ignored: {rule.reason}" if active and rule.kind is OptionClass.UNSUPPORTED else None
    return Option(path, value, rule.kind, outcome, warning=warning)


def _unknown(path: str, value: Any, key: str, known: Sequence[str]) -> Option:
    hint = nearest_key(key, known)
    return Option(path, value, OptionClass.UNKNOWN, f"ignored{hint}", warning=f"unknown and ignored{hint}")


def nearest_key(key: str, known: Iterable[str]) -> str:
    """«, the nearest known key is …», or nothing when none is near."""
    found = get_close_matches(key, list(known), n=1, cutoff=0.6)
    return f", the nearest known key is {found[0]}" if found else ""


def nearest_flag(name: str, known: Iterable[str]) -> str:
    """«, the nearest is --…», or nothing when none is near. `name` and `known` with underscores."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", the nearest is --{found[0].replace('_', '-')}" if found else ""


def refusal_of_extra(taken: Mapping[str, str]) -> Callable[[str], str | None]:
    """Why a worker flag may not stand in `extra_cli_args`, as a function of its name with underscores.

    `taken`: flags the recipe has already set, and by which key.
    """

    def refusal(name: str) -> str | None:
        if name in taken:
            return f"is already set by {taken[name]}"
        if name == PREFIX_CACHING:
            return f"set it by {VLLM_KWARGS}.{name}"
        rule = KWARGS.get(name)
        if rule is not None:
            where = "set it by" if rule.kind is OptionClass.MOVED else f"{rule.kind}:"
            return f"{where} {rule.reason}"
        if name in MANAGED_WORKER_FLAGS:
            return "managed: a flag of dynamo.vllm that the runtime sets or leaves off"
        if name not in ENGINE_FLAGS and name not in OPEN_WORKER_FLAGS:
            return "is no flag of dynamo.vllm" + nearest_flag(name, [*ENGINE_FLAGS, *WORKER_FLAGS])
        return None

    return refusal

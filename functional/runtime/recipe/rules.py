"""What a recipe may not say: rules that join several keys, or judge keys the models leave open.

Each rule judges one thing, and reads no key that it does not judge by: where a key is at fault by itself, the rules
that read it are silent (`UnreadKeyError`), and all others are heard.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from functional.runtime.recipe.architectures import find_layout_problems, find_model_problem, read_config
from functional.runtime.recipe.argv import FRONTEND_OWNERS, is_inline, worker_flag_owners
from functional.runtime.recipe.engine_flags import ENGINE_FLAGS, FRONTEND_FLAGS, WORKER_FLAGS
from functional.runtime.recipe.environment import MANAGED_PREFIXES, MANAGED_VARIABLES, SHARED_GPU
from functional.runtime.recipe.flags import Kind, find_extra_problem
from functional.runtime.recipe.model import DynamoConfig, Recipe, UnreadKeyError
from functional.runtime.recipe.options import (
    GENERATION,
    VLLM_CFG,
    VLLM_KWARGS,
    WORKER_ARGS,
    nearest_flag,
    nearest_key,
    refusal_of_extra,
)
from functional.runtime.recipe.paths import find_file_problem, is_folder
from functional.runtime.recipe.redact import redacted

RESOURCES = f"{GENERATION}.colocated.resources"
FLAG_FILE: dict[str, Kind] = {"config": "value"}
"""vLLM's parser reads flags from the file `--config` names; that one is taken by its full name only."""
MAX_STOP_STRINGS = 32
"""The limit of Dynamo's API for one request."""
MAX_SENT_STOPS = 4
"""What Dynamo 1.3.0.post1 takes in fact: behind its API's check, more stop strings or stop token IDs are a 500."""
ASYNC = "grpo.async_grpo"
TRUNCATION = "loss_fn.truncated_importance_sampling"
TRUNCATIONS = ("tis", "icepop", "seq-mask-tis")
UNCORRECTED = "has no effect: set loss_fn.use_importance_sampling_correction to true, or this to null"
TOOL_DATA = "tool_arithmetic"
BUILTIN_DATA = ("arithmetic", "token_set", TOOL_DATA)
KEEPS_TOKEN_DATA = ("qwen3_coder", "deepseek_v4")
"""Tool parsers seen to keep `engine_data` of an answer to a request with tools (Dynamo 1.3.0.post1)."""
LOAD_FORMATS = (
    *("auto", "dummy", "fastsafetensors", "hf", "instanttensor", "mistral", "modelexpress", "npcache", "pt"),
    *("runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state", "tensorizer"),
)
"""vLLM's, but for those of quantized weights. What an engine loads is replaced by the first update."""
OTHER_ENGINES = ("sglang_cfg", "trtllm_cfg", "megatron_cfg", "hf_cfg")
QUANTIZATION = ("quant_cfg", "quantization", "real_quant", "real_quant_ignore", "fp8_cfg")
SPECULATION = ("speculative_config", "speculative_cfg", "speculative_decoding")
REFUSED = {
    "refit_transport": "updates go through the runtime's own collective: leave it null",
    "bad_words": "Dynamo's completions take no bad words: remove it",
}
IGNORED = {
    **dict.fromkeys(("port_range_low", "port_range_high"), "the runtime takes ports itself"),
    **dict.fromkeys(("refit_cfg", "checkpoint_engine"), "updates go through the runtime's own collective"),
    "real_quant_export_cpu_offload": "nothing is quantized",
    "use_async_rollouts": "rollouts are always asynchronous",
    "mcore_generation_config": "a section of another engine",
}
"""Keys NeMo RL's base recipe gives the section, of no use here, and why."""
NEUTRAL_SAMPLING = {
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_tokens": 0,
    "logit_bias": None,
}
"""Sampling options of which a recipe may say only this: the trainer scores the model's own distribution."""
LOSS_OFF: dict[str, Any] = {
    "disable_ppo_ratio": False,
    "sequence_level_importance_ratios": False,
    "use_cispo": False,
    "use_kl_in_reward": False,
    "use_on_policy_kl_approximation": False,
    "ratio_clip_c": None,
    "positive_example_nll_weight": 0,
}
"""Keys of NeMo RL's `loss_fn` that the suite's trainer does not have, with the value that asks for nothing."""


ALWAYS = {"force_on_policy_ratio": "one optimizer step a batch: the ratio is 1 when it is taken, whatever this says"}
"""Of `loss_fn`, what holds by itself, and why."""


@dataclass(frozen=True)
class Problem:
    """A key with a value that may not be; `str()` is one line."""

    key: str
    value: Any
    message: str
    has_value: bool = True

    def __str__(self) -> str:
        return f"{self.key}={self.shown_value}: {self.message}" if self.has_value else f"{self.key}: {self.message}"

    @property
    def shown_value(self) -> str:
        """The value in short, secrets replaced."""
        text = repr(redacted(self.value, self.key.rpartition(".")[2]))
        return text if len(text) <= 100 else text[:97] + "…"


Rule = Callable[[Recipe], Iterator[Problem]]


def find_problems(recipe: Recipe, rules: Sequence[Rule]) -> list[Problem]:
    """Every one of the rules that the recipe breaks, in their order."""
    found: list[Problem] = []
    for rule in rules:
        with suppress(UnreadKeyError):
            for problem in rule(recipe):
                found.append(problem)  # what it found before it met a key at fault counts too
    return found


def _group_fits(recipe: Recipe) -> Iterator[Problem]:
    vllm = recipe.policy.generation.vllm_cfg
    tensor, pipeline = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    group, node = tensor * pipeline, recipe.engine_devices
    if group > node:
        message = f"with pipeline_parallel_size={pipeline} an engine takes {group} devices, and must fit on one node: "
        yield Problem(f"{VLLM_CFG}.tensor_parallel_size", tensor, message + f"{RESOURCES}.gpus_per_node is {node}")
    elif node % group:
        message = f"engines of {group} devices do not divide it: a node would keep {node % group} idle"
        yield Problem(f"{RESOURCES}.gpus_per_node", node, message)


def _expert_group(recipe: Recipe) -> Iterator[Problem]:
    vllm = recipe.policy.generation.vllm_cfg
    tensor, expert = vllm.tensor_parallel_size, vllm.expert_parallel_size
    if expert not in (1, tensor):
        yield Problem(f"{VLLM_CFG}.expert_parallel_size", expert, f"must be 1 or tensor_parallel_size, {tensor}")


def _colocation(recipe: Recipe) -> Iterator[Problem]:
    if recipe.policy.generation.colocated.enabled:
        message = "training and generation are never colocated here, set it to false"
        yield Problem(f"{GENERATION}.colocated.enabled", True, message)


def _devices(recipe: Recipe) -> Iterator[Problem]:
    """On a node with engines these take `resources.gpus_per_node` devices; on the first node the trainer has others."""
    cluster, generation = recipe.cluster, recipe.engine_devices
    if recipe.engine_nodes < cluster.num_nodes:
        if generation > cluster.gpus_per_node:
            message = f"a node has {cluster.gpus_per_node} device(s) (cluster.gpus_per_node)"
            yield Problem(f"{RESOURCES}.gpus_per_node", generation, message)
    elif 1 + generation > cluster.gpus_per_node:
        hint = ", a shared one counts twice" if cluster.share_gpu else ""
        what = f"one trainer and {generation} generation device(s) need {1 + generation}{hint}"
        where = "" if cluster.num_nodes == 1 else f" on the first node, with engines on each ({RESOURCES}.num_nodes)"
        message = f"{what}{where}; there are {cluster.gpus_per_node}"
        yield Problem("cluster.gpus_per_node", cluster.gpus_per_node, message)


def _nodes(recipe: Recipe) -> Iterator[Problem]:
    nodes, engines = recipe.cluster.num_nodes, recipe.engine_nodes
    if engines > nodes:
        yield Problem(f"{RESOURCES}.num_nodes", engines, f"the cluster has {nodes} (cluster.num_nodes)")
    elif nodes - engines > 1:
        message = f"the trainer takes one node and engines {engines} ({RESOURCES}.num_nodes): set at most {engines + 1}"
        yield Problem("cluster.num_nodes", nodes, message)
    if nodes > 1 and recipe.cluster.share_gpu:
        yield Problem("cluster.share_gpu", True, "is for one node: set cluster.num_nodes to 1")


def _shared_gpu(recipe: Recipe) -> Iterator[Problem]:
    if recipe.cluster.share_gpu and recipe.cluster.device != "cuda":
        yield Problem("cluster.share_gpu", True, "is for cluster.device=cuda; on cpu devices are virtual already")


def _model(recipe: Recipe) -> Iterator[Problem]:
    """What a model's own configuration rules out; a hub's model that is not here yet is judged once it is."""
    name = recipe.policy.model_name
    problem = None
    if is_folder(name):
        problem = find_model_problem(Path(name) / "config.json")
    elif name.startswith(("/", "./", "../")):
        problem = "no such folder"
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name) and isinstance(kept := _in_hub_cache(name), str):
        problem = find_model_problem(Path(kept))
    if problem:
        yield Problem("policy.model_name", name, problem)


def _model_layout(recipe: Recipe) -> Iterator[Problem]:
    """What the layout of an engine asks of a model; as `_model`, of one that is here."""
    name = recipe.policy.model_name
    if is_folder(name):
        config = read_config(Path(name) / "config.json")
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name) and isinstance(kept := _in_hub_cache(name), str):
        config = read_config(Path(kept))
    else:
        config = {}
    yield from layout_problems(recipe, config)


def layout_problems(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Of an engine's layout and a model with this config.json."""
    for key, message in find_layout_problems(config, recipe.layout, recipe.cluster.device):
        yield Problem(f"{VLLM_CFG}.{key}", getattr(recipe.policy.generation.vllm_cfg, key), message)


def _in_hub_cache(name: str) -> Any:
    from huggingface_hub import try_to_load_from_cache  # half a second of import, needed here alone

    return try_to_load_from_cache(name, "config.json")


def _sections(recipe: Recipe) -> Iterator[Problem]:
    """Keys of `policy.generation` that the model leaves open."""
    generation = recipe.policy.generation
    for key, value in (generation.model_extra or {}).items():
        path, active = f"{GENERATION}.{key}", value not in (None, False, {}, [], "")
        if key in IGNORED or (not active and key in (*OTHER_ENGINES, *QUANTIZATION, *SPECULATION, *REFUSED)):
            continue
        if key in OTHER_ENGINES:
            yield Problem(path, value, "a section of another engine: the managed engine is vllm, remove it")
        elif key in QUANTIZATION:
            yield Problem(path, value, "generation runs in bfloat16, without quantization: remove it")
        elif key in SPECULATION:
            yield Problem(path, value, "the managed runtime has no speculative decoding: remove it")
        elif key in REFUSED:
            yield Problem(path, value, REFUSED[key])
        elif key == "seed":
            if value is not None:
                yield Problem(path, value, "moved, set grpo.seed: each engine gets a seed of its own, made of it")
        elif key in NEUTRAL_SAMPLING:
            if value is not None and not is_same(value, NEUTRAL_SAMPLING[key]):
                yield Problem(path, value, "the trainer scores the model's own distribution: remove it")
        else:
            yield Problem(path, value, "unknown key" + nearest_key(key, [*type(generation).model_fields, *IGNORED]))


def _options(recipe: Recipe) -> Iterator[Problem]:
    """Errors of the single options in `vllm_cfg` and `vllm_kwargs`."""
    for option in recipe.options:
        if option.error:
            yield Problem(option.path, option.value, option.error)


QUANTIZED_FORMATS = ("bitsandbytes", "gguf")


def _load_format(recipe: Recipe) -> Iterator[Problem]:
    given = recipe.policy.generation.vllm_cfg.load_format
    if given in QUANTIZED_FORMATS:
        yield Problem(f"{VLLM_CFG}.load_format", given, "generation runs in bfloat16, without quantization")
    elif given not in LOAD_FORMATS:
        yield Problem(f"{VLLM_CFG}.load_format", given, "vLLM 0.23.0 has " + ", ".join(LOAD_FORMATS))


def _scheduler(recipe: Recipe) -> Iterator[Problem]:
    scheduler = recipe.policy.scheduler
    if scheduler is None:
        return
    if not scheduler.stages:
        yield Problem("policy.scheduler.stages", [], "give one at least, or policy.scheduler=null")
    elif len(scheduler.milestones) != len(scheduler.stages) - 1:
        message = f"{len(scheduler.stages)} stages have {len(scheduler.stages) - 1} milestone(s) between them"
        yield Problem("policy.scheduler.milestones", scheduler.milestones, message)


def _validation(recipe: Recipe) -> Iterator[Problem]:
    grpo, data = recipe.grpo, recipe.data
    validates = grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end
    has_questions = data.validation is not None or data.split_validation_size > 0 or data.dataset_name == "token_set"
    if validates and data.dataset_name == TOOL_DATA:
        yield Problem("data.dataset_name", TOOL_DATA, "agents are not validated: set grpo.val_* to none")
    elif validates and not has_questions:
        key = "val_period" if grpo.val_period > 0 else "val_at_start" if grpo.val_at_start else "val_at_end"
        message = "nothing to validate on: give data.validation or data.split_validation_size"
        yield Problem(f"grpo.{key}", getattr(grpo, key), message)
    metric, threshold = grpo.stop_at_validation_metric, grpo.stop_at_validation_threshold
    if metric is not None and threshold is None:
        yield Problem("grpo.stop_at_validation_metric", metric, "give grpo.stop_at_validation_threshold too")
    if metric == "pass_k" and grpo.val_num_generations_per_prompt == 1:
        message = "one generation has no pass_k: raise grpo.val_num_generations_per_prompt"
        yield Problem("grpo.stop_at_validation_metric", metric, message)


def _validation_data(recipe: Recipe) -> Iterator[Problem]:
    if (source := recipe.data.validation) is None:
        return
    key, name, trained = "data.validation.dataset_name", source.dataset_name, recipe.data.dataset_name
    yield from _dataset(key, name)
    if name == TOOL_DATA or (name == "token_set") != (trained == "token_set"):
        yield Problem(key, name, f"is rewarded otherwise than data.dataset_name={trained}")


def _checkpointing(recipe: Recipe) -> Iterator[Problem]:
    given = recipe.checkpointing
    if not given.enabled:
        return
    if given.model_save_format not in (None, "safetensors"):
        yield Problem("checkpointing.model_save_format", given.model_save_format, "weights are kept as safetensors")
    if given.checkpoint_must_save_by is not None:
        message = "checkpoints go by steps: set save_period, and this to null"
        yield Problem("checkpointing.checkpoint_must_save_by", given.checkpoint_must_save_by, message)
    if given.metric_name is not None and not given.metric_name.startswith(("train:", "val:")):
        yield Problem("checkpointing.metric_name", given.metric_name, "begins with train: or val:")


def _clip(recipe: Recipe) -> Iterator[Problem]:
    low, high = recipe.grpo.advantage_clip_low, recipe.grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield Problem("grpo.advantage_clip_low", low, f"is above grpo.advantage_clip_high, {high}")


def _metrics_interval(recipe: Recipe) -> Iterator[Problem]:
    generation = recipe.policy.generation
    given = generation.vllm_cfg.vllm_metrics_logger_interval
    ours = generation.dynamo_cfg.metrics_interval_s
    if given not in (None, ours) and "metrics_interval_s" in generation.dynamo_cfg.model_fields_set:
        message = f"{GENERATION}.dynamo_cfg.metrics_interval_s={ours:g} says otherwise: give one of them"
        yield Problem(f"{VLLM_CFG}.vllm_metrics_logger_interval", given, message)


def _stops(recipe: Recipe) -> Iterator[Problem]:
    path, given = f"{GENERATION}.stop_strings", recipe.policy.generation.stop_strings or []
    if "" in given:
        yield Problem(path, given, "an empty stop string would end every completion at once")
    try:
        merge_stop_strings(given)
    except ValueError as error:
        yield Problem(path, given, str(error))


def find_warnings(recipe: Recipe) -> list[str]:
    """What is ignored although it was asked for, would not run, or needs care; one line each."""
    ignored = [Problem(option.path, option.value, option.warning) for option in recipe.options if option.warning]
    return [str(problem) for problem in ignored + find_unsendable(recipe) + find_cautions(recipe)]


def find_unsendable(recipe: Recipe) -> list[Problem]:
    """What the rules allow and the pinned Dynamo answers with a 500: warned of, and refused before a run."""
    generation = recipe.policy.generation
    stops = {"stop_strings": generation.stop_strings, "stop_token_ids": generation.stop_token_ids}
    return [
        Problem(f"{GENERATION}.{key}", values, f"Dynamo 1.3.0.post1 answers 500 beyond {MAX_SENT_STOPS} of them")
        for key, values in stops.items()
        if len(set(values or ())) > MAX_SENT_STOPS
    ]


def find_cautions(recipe: Recipe) -> list[Problem]:
    """What runs, but not as one may expect: only warned of.

    Seen on Dynamo 1.3.0.post1: the frontend ends the stream at a stop string, before the last chunk, which carries
    `engine_data`; so the token check fails such a sample. The engine itself ends at stop token IDs.
    """
    cautions = []
    generation = recipe.policy.generation
    if given := generation.stop_strings:
        message = "samples that end at a stop string come without engine_data and are rejected, use stop_token_ids"
        cautions.append(Problem(f"{GENERATION}.stop_strings", given, message))
    if recipe.policy.generation.vllm_cfg.expose_http_server:
        cautions += _chat_cautions(recipe.policy.generation.dynamo_cfg)
    grpo = recipe.grpo
    cautions += _asynchronous_cautions(recipe)
    if not recipe.has_prefix_cache:
        message = "no cache to clear, so no update is seen to clear one: that check is skipped, and those of KV routing"
        cautions.append(Problem(f"{VLLM_KWARGS}.enable_prefix_caching", False, message))
    types = generation.dynamo_cfg.worker_args.endpoint_types
    if "completions" not in types:
        message = "rollouts and probes use /v1/completions: it is served too"
        cautions.append(Problem(f"{WORKER_ARGS}.endpoint_types", types, message))
    if grpo.normalize_rewards and grpo.use_leave_one_out_baseline and grpo.num_generations_per_prompt == 2:
        message = "has no effect on two generations with use_leave_one_out_baseline: one reward has no deviation"
        cautions.append(Problem("grpo.normalize_rewards", True, message))
    return cautions


def _asynchronous_cautions(recipe: Recipe) -> Iterator[Problem]:
    given = recipe.grpo.async_grpo
    if not given.enabled:
        return
    if recipe.data.dataset_name == TOOL_DATA:
        message = "conversations are generated between steps: none is older than the policy, which every bound allows"
        yield Problem(f"{ASYNC}.enabled", True, message)
    if not given.recompute_kv_cache_after_weight_updates:
        message = "caches are cleared with each update all the same: its proof asks for that"
        yield Problem(f"{ASYNC}.recompute_kv_cache_after_weight_updates", False, message)
    if given.max_generation_failures:
        message = "no sample is dropped: what is lost with a worker is generated again, any other failure ends the run"
        yield Problem(f"{ASYNC}.max_generation_failures", given.max_generation_failures, message)


def _chat_cautions(dynamo: DynamoConfig) -> Iterator[Problem]:
    parser = dynamo.worker_args.tool_call_parser
    if parser is not None and parser not in KEEPS_TOKEN_DATA:
        message = (
            "Dynamo 1.3.0.post1 may drop engine_data of answers to requests with tools, which are then rejected: "
            f"use {' or '.join(KEEPS_TOKEN_DATA)}"
        )
        yield Problem(f"{WORKER_ARGS}.tool_call_parser", parser, message)
    with suppress(ValueError):
        if not ip_address(dynamo.chat_host).is_loopback:
            message = "whoever reaches this address may use the chat server: it knows no credentials"
            yield Problem(f"{GENERATION}.dynamo_cfg.chat_host", dynamo.chat_host, message)


def merge_stop_strings(*sources: Iterable[str] | None) -> tuple[str, ...]:
    """The recipe's stop strings and a request's own, each once. Raises ValueError when they are more than 32."""
    merged = tuple(dict.fromkeys(text for source in sources for text in source or ()))
    if len(merged) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(merged)} stop strings after merging, at most {MAX_STOP_STRINGS} can be sent")
    return merged


def _variables(recipe: Recipe) -> Iterator[Problem]:
    given = recipe.policy.generation.vllm_cfg.env_vars
    for name, value in given.items():
        if reason := _variable_problem(name, value):
            yield _variable(name, value, reason)


def _variables_of_a_shared_gpu(recipe: Recipe) -> Iterator[Problem]:
    given = recipe.policy.generation.vllm_cfg.env_vars
    if recipe.cluster.share_gpu:
        for name in given.keys() & SHARED_GPU.keys() - MANAGED_VARIABLES:
            yield _variable(
                name, given[name], "is managed by the runtime where trainer and worker share a GPU: remove it"
            )


def _variable(name: str, value: str, reason: str) -> Problem:
    return Problem(f"{VLLM_CFG}.env_vars.{name}", redacted({name: value}, "env_vars")[name], reason)


def _variable_problem(name: str, value: str) -> str | None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return "is no name of an environment variable"
    if prefix := next((prefix for prefix in MANAGED_PREFIXES if name.upper().startswith(prefix)), None):
        return f"{prefix}* variables are the runtime's: remove it"
    if name.upper() in MANAGED_VARIABLES:
        return "is managed by the runtime: remove it"
    return "holds a NUL byte" if "\0" in value else None


def _endpoint_types(recipe: Recipe) -> Iterator[Problem]:
    given = recipe.policy.generation.dynamo_cfg.worker_args.endpoint_types
    if len(set(given)) < len(given):
        yield Problem(f"{WORKER_ARGS}.endpoint_types", given, "names one twice")


def _template(recipe: Recipe) -> Iterator[Problem]:
    template = recipe.policy.generation.dynamo_cfg.worker_args.custom_jinja_template
    if template is None or is_inline(template):
        return
    path = template
    with suppress(RuntimeError):  # the home of a user that is not there
        path = str(Path(template).expanduser())
    if problem := find_file_problem(path):
        yield Problem(f"{WORKER_ARGS}.custom_jinja_template", template, problem)


def _worker_words(recipe: Recipe) -> Iterator[Problem]:
    words = recipe.policy.generation.dynamo_cfg.worker_args.extra_cli_args
    try:
        owners = worker_flag_owners(recipe)
    except UnreadKeyError:  # which flags the other keys set is not known then; most words are refused whatever it is
        owners = {}
    yield from _extra(WORKER_ARGS, words, ENGINE_FLAGS | WORKER_FLAGS | FLAG_FILE, refusal_of_extra(owners))


def _frontend_words(recipe: Recipe) -> Iterator[Problem]:
    def refusal(name: str) -> str | None:
        if name in FRONTEND_OWNERS:
            return FRONTEND_OWNERS[name]
        if name not in FRONTEND_FLAGS:
            return "is no flag of dynamo.frontend" + nearest_flag(name, FRONTEND_FLAGS)
        return None

    extra = recipe.policy.generation.dynamo_cfg.frontend_args.extra_cli_args
    yield from _extra(f"{GENERATION}.dynamo_cfg.frontend_args", extra, FRONTEND_FLAGS, refusal)


def _extra(path: str, words: Sequence[str], flags: Any, refusal: Callable[[str], str | None]) -> Iterator[Problem]:
    if found := find_extra_problem(words, flags, refusal):
        word, reason = found
        yield Problem(f"{path}.extra_cli_args", list(words), f"{redacted([word])[0]!r} {reason}")


def _chat(recipe: Recipe) -> Iterator[Problem]:
    generation = recipe.policy.generation
    dynamo = generation.dynamo_cfg
    if not generation.vllm_cfg.expose_http_server:
        if recipe.data.dataset_name == TOOL_DATA:
            message = f"agents talk to the chat server: set {VLLM_CFG}.expose_http_server to true"
            yield Problem("data.dataset_name", TOOL_DATA, message)
        return
    if "chat" not in dynamo.worker_args.endpoint_types:
        message = f"{VLLM_CFG}.expose_http_server uses /v1/chat/completions: add chat"
        yield Problem(f"{WORKER_ARGS}.endpoint_types", dynamo.worker_args.endpoint_types, message)
    for key, whole in (("top_p", (1.0,)), ("top_k", (None, -1, 0))):
        if (value := getattr(generation, key)) not in whole:
            yield Problem(
                f"{GENERATION}.{key}", value, "the chat server samples from the whole distribution: leave it out"
            )
    if dynamo.frontend_args.router_mode == "direct":
        message = "the chat server's requests name no worker: let the frontend route them"
        yield Problem(f"{GENERATION}.dynamo_cfg.frontend_args.router_mode", "direct", message)
    host = f"{GENERATION}.dynamo_cfg.chat_host"
    try:
        if ip_address(dynamo.chat_host).is_unspecified:
            yield Problem(host, dynamo.chat_host, "would listen everywhere: name one address")
    except ValueError:
        yield Problem(host, dynamo.chat_host, "must be an IP address of this machine")


def _data(recipe: Recipe) -> Iterator[Problem]:
    yield from _dataset("data.dataset_name", recipe.data.dataset_name)


def _dataset(key: str, name: str) -> Iterator[Problem]:
    if name in BUILTIN_DATA:
        return
    if not name.endswith(".jsonl"):
        message = f"expected {' or '.join(BUILTIN_DATA)}, or the path of a local .jsonl file"
        yield Problem(key, name, message)
    elif problem := find_file_problem(name):
        yield Problem(key, name, problem)


def _truncation_type(recipe: Recipe) -> Iterator[Problem]:
    loss = recipe.loss_fn
    kind = loss.truncated_importance_sampling_type
    if kind is None:
        return
    if kind not in TRUNCATIONS:
        yield Problem(f"{TRUNCATION}_type", kind, f"is none of {', '.join(TRUNCATIONS)}, or null")
    elif not loss.use_importance_sampling_correction:
        yield Problem(f"{TRUNCATION}_type", kind, UNCORRECTED)
    elif loss.truncated_importance_sampling_ratio is None:
        yield Problem(f"{TRUNCATION}_type", kind, f"has no effect: set {TRUNCATION}_ratio, or this to null")
    elif kind != "tis" and loss.truncated_importance_sampling_ratio_min is None:
        yield Problem(f"{TRUNCATION}_type", kind, f"needs both bounds: set {TRUNCATION}_ratio_min")


def _truncation_bounds(recipe: Recipe) -> Iterator[Problem]:
    loss = recipe.loss_fn
    low, high = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    if low is None:
        return
    if loss.truncated_importance_sampling_type is None:
        yield Problem(f"{TRUNCATION}_ratio_min", low, f"has no effect: set {TRUNCATION}_type, or this to null")
    elif high is not None and low > high:
        yield Problem(f"{TRUNCATION}_ratio_min", low, f"is above {TRUNCATION}_ratio, {high:g}")


def _truncation_ratio(recipe: Recipe) -> Iterator[Problem]:
    loss = recipe.loss_fn
    ratio = loss.truncated_importance_sampling_ratio
    if ratio is not None and not loss.use_importance_sampling_correction:
        yield Problem(f"{TRUNCATION}_ratio", ratio, UNCORRECTED)


def _asynchronous(recipe: Recipe) -> Iterator[Problem]:
    """Samples of an older policy are off policy: without the correction the objective is another one."""
    given, loss = recipe.grpo.async_grpo, recipe.loss_fn
    if given.enabled and recipe.data.dataset_name != TOOL_DATA and not loss.use_importance_sampling_correction:
        message = "needs loss_fn.use_importance_sampling_correction: samples are older than the policy that is trained"
        yield Problem(f"{ASYNC}.enabled", True, message)


def _loss_keys(recipe: Recipe) -> Iterator[Problem]:
    """Keys of `loss_fn` that the model leaves open."""
    for key, value in (recipe.loss_fn.model_extra or {}).items():
        if key in ALWAYS:
            continue
        if key not in LOSS_OFF:
            known = [*type(recipe.loss_fn).model_fields, *LOSS_OFF]
            yield Problem(f"loss_fn.{key}", value, "unknown key" + nearest_key(key, known))
        elif value is not None and not is_same(value, LOSS_OFF[key]):
            message = f"the suite's trainer does not do that: remove it, or set {as_yaml(LOSS_OFF[key])}"
            yield Problem(f"loss_fn.{key}", value, message)


def outcome_of_extra(path: str) -> str:
    """What became of a key that the models leave open and the rules let pass."""
    section, _, name = path.removeprefix(f"{GENERATION}.").removeprefix("loss_fn.").partition(".")
    return "ignored: " + (IGNORED | ALWAYS).get(section, "nothing is asked for" + (f" by {name}" if name else ""))


def is_same(value: Any, wanted: Any) -> bool:
    """Equal, where true is not 1 and false is not 0."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def _weights_and_biases(recipe: Recipe) -> Iterator[Problem]:
    if recipe.logger.wandb_enabled and importlib.util.find_spec("wandb") is None:
        message = "this environment has no wandb package: install it, or set it to false"
        yield Problem("logger.wandb_enabled", True, message)


RULES: tuple[Rule, ...] = (
    _model,
    _model_layout,
    _group_fits,
    _expert_group,
    _colocation,
    _devices,
    _nodes,
    _shared_gpu,
    _sections,
    _options,
    _load_format,
    _scheduler,
    _clip,
    _validation,
    _validation_data,
    _checkpointing,
    _metrics_interval,
    _stops,
    _variables,
    _variables_of_a_shared_gpu,
    _endpoint_types,
    _chat,
    _template,
    _worker_words,
    _frontend_words,
    _loss_keys,
    _truncation_type,
    _truncation_ratio,
    _truncation_bounds,
    _asynchronous,
    _data,
    _weights_and_biases,
)

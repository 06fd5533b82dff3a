"""What a recipe may not say: rules that join several keys, or judge keys the models leave open."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from functional.runtime.engine_flags import ENGINE_FLAGS, FRONTEND_FLAGS, WORKER_FLAGS, Kind
from functional.runtime.flags import find_extra_problem
from functional.runtime.options import (
    GENERATION,
    VLLM_CFG,
    WORKER_ARGS,
    classify,
    nearest_flag,
    nearest_key,
    refusal_of_extra,
)
from functional.runtime.redact import redacted
from functional.runtime.worker_args import (
    FRONTEND_OWNERS,
    MANAGED_PREFIXES,
    MANAGED_VARIABLES,
    SHARED_GPU,
    worker_flag_owners,
)

if TYPE_CHECKING:
    from functional.runtime.config import Recipe

RESOURCES = f"{GENERATION}.colocated.resources"
FLAG_FILE: dict[str, Kind] = {"config": "value"}
"""vLLM's parser reads flags from the file `--config` names; that one is taken by its full name only."""
MAX_STOP_STRINGS = 32
"""The limit of Dynamo's API for one request."""
MAX_SENT_STOPS = 4
"""What Dynamo 1.3.0.post1 takes in fact: behind its API's check, more stop strings or stop token IDs are a 500."""
BUILTIN_DATA = ("arithmetic", "token_set")
OTHER_ENGINES = ("sglang_cfg", "trtllm_cfg", "mcore_generation_config", "megatron_cfg", "hf_cfg")
QUANTIZATION = ("quant_cfg", "quantization", "real_quant", "real_quant_ignore", "fp8_cfg")
SPECULATION = ("speculative_config", "speculative_cfg", "speculative_decoding")
REFUSED = {
    "refit_transport": "updates go through the runtime's own collective: leave it null",
    "bad_words": "Dynamo's completions take no bad words: remove it",
}
IGNORED = (
    *("val_temperature", "val_top_p", "val_top_k", "use_async_rollouts", "port_range_low", "port_range_high"),
    *("refit_cfg", "checkpoint_engine", "real_quant_export_cpu_offload"),
)
"""Keys NeMo RL's base recipe gives the section, of no use here: no validation, the runtime's own ports and refit."""


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


def find_problems(recipe: "Recipe") -> list[Problem]:
    """Every rule the recipe breaks, in the order of the rules."""
    return [problem for rule in RULES for problem in rule(recipe)]


def _parallelism(recipe: "Recipe") -> Iterator[Problem]:
    vllm, resources = recipe.policy.generation.vllm_cfg, recipe.policy.generation.colocated.resources
    tensor, pipeline, expert = vllm.tensor_parallel_size, vllm.pipeline_parallel_size, vllm.expert_parallel_size
    group, node = tensor * pipeline, resources.gpus_per_node
    if group > node:
        message = f"with pipeline_parallel_size={pipeline} an engine takes {group} devices, and must fit on one node: "
        yield Problem(f"{VLLM_CFG}.tensor_parallel_size", tensor, message + f"{RESOURCES}.gpus_per_node is {node}")
    elif node % group:
        message = f"engines of {group} devices do not divide it: a node would keep {node % group} idle"
        yield Problem(f"{RESOURCES}.gpus_per_node", node, message)
    if expert not in (1, tensor):
        yield Problem(f"{VLLM_CFG}.expert_parallel_size", expert, f"must be 1 or tensor_parallel_size, {tensor}")


def _placement(recipe: "Recipe") -> Iterator[Problem]:
    cluster, resources = recipe.cluster, recipe.policy.generation.colocated.resources
    if recipe.policy.generation.colocated.enabled:
        message = "training and generation are never colocated here, set it to false"
        yield Problem(f"{GENERATION}.colocated.enabled", True, message)
    generation = resources.gpus_per_node * resources.num_nodes
    offered = cluster.gpus_per_node * cluster.num_nodes
    if 1 + generation > offered:
        hint = ", a shared one counts twice" if cluster.share_gpu else ""
        message = f"one trainer and {generation} generation device(s) need {1 + generation}{hint}; there are {offered}"
        yield Problem("cluster.gpus_per_node", cluster.gpus_per_node, message)
    if cluster.share_gpu and cluster.device != "cuda":
        yield Problem("cluster.share_gpu", True, "is for cluster.device=cuda; on cpu devices are virtual already")


def _sections(recipe: "Recipe") -> Iterator[Problem]:
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
        else:
            yield Problem(path, value, "unknown key" + nearest_key(key, [*type(generation).model_fields, *IGNORED]))


def _options(recipe: "Recipe") -> Iterator[Problem]:
    """Errors of the single options in `vllm_cfg` and `vllm_kwargs`."""
    for option in classify(recipe.policy.generation, recipe.cluster.device):
        if option.error:
            yield Problem(option.path, option.value, option.error)


def _stops(recipe: "Recipe") -> Iterator[Problem]:
    path, given = f"{GENERATION}.stop_strings", recipe.policy.generation.stop_strings or []
    if "" in given:
        yield Problem(path, given, "an empty stop string would end every completion at once")
    try:
        merge_stop_strings(given)
    except ValueError as error:
        yield Problem(path, given, str(error))


def find_unsendable(recipe: "Recipe") -> list[Problem]:
    """What the rules allow and the pinned Dynamo answers with a 500: warned of, and refused before a run."""
    generation = recipe.policy.generation
    stops = {"stop_strings": generation.stop_strings, "stop_token_ids": generation.stop_token_ids}
    return [
        Problem(f"{GENERATION}.{key}", values, f"Dynamo 1.3.0.post1 answers 500 beyond {MAX_SENT_STOPS} of them")
        for key, values in stops.items()
        if len(set(values or ())) > MAX_SENT_STOPS
    ]


def find_cautions(recipe: "Recipe") -> list[Problem]:
    """What runs, but not as one may expect: only warned of.

    Seen on Dynamo 1.3.0.post1: the frontend ends the stream at a stop string, before the last chunk, which carries
    `engine_data`; so the token check fails such a sample. The engine itself ends at stop token IDs.
    """
    given = recipe.policy.generation.stop_strings
    message = "samples that end at a stop string come without engine_data and are rejected, use stop_token_ids"
    return [Problem(f"{GENERATION}.stop_strings", given, message)] if given else []


def merge_stop_strings(*sources: Iterable[str] | None) -> tuple[str, ...]:
    """The recipe's stop strings and a request's own, each once. Raises ValueError when they are more than 32."""
    merged = tuple(dict.fromkeys(text for source in sources for text in source or ()))
    if len(merged) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(merged)} stop strings after merging, at most {MAX_STOP_STRINGS} can be sent")
    return merged


def _variables(recipe: "Recipe") -> Iterator[Problem]:
    for name, value in recipe.policy.generation.vllm_cfg.env_vars.items():
        if reason := _variable_problem(name, value, recipe.cluster.share_gpu):
            shown = redacted({name: value}, "env_vars")[name]
            yield Problem(f"{VLLM_CFG}.env_vars.{name}", shown, reason)


def _variable_problem(name: str, value: str, share_gpu: bool) -> str | None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return "is no name of an environment variable"
    if prefix := next((prefix for prefix in MANAGED_PREFIXES if name.upper().startswith(prefix)), None):
        return f"{prefix}* variables are the runtime's: remove it"
    if name.upper() in MANAGED_VARIABLES or (share_gpu and name.upper() in SHARED_GPU):
        return "is managed by the runtime: remove it"
    return "holds a NUL byte" if "\0" in value else None


def _worker_args(recipe: "Recipe") -> Iterator[Problem]:
    arguments = recipe.policy.generation.dynamo_cfg.worker_args
    if "completions" not in arguments.endpoint_types:
        message = "rollouts use /v1/completions: add completions"
        yield Problem(f"{WORKER_ARGS}.endpoint_types", arguments.endpoint_types, message)
    template = arguments.custom_jinja_template
    if template is not None and not Path(template).expanduser().is_file():
        yield Problem(f"{WORKER_ARGS}.custom_jinja_template", template, "no such file")
    refusal = refusal_of_extra(worker_flag_owners(recipe.policy.generation, recipe.cluster.device))
    yield from _extra(WORKER_ARGS, arguments.extra_cli_args, ENGINE_FLAGS | WORKER_FLAGS | FLAG_FILE, refusal)


def _frontend_args(recipe: "Recipe") -> Iterator[Problem]:
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


def _data(recipe: "Recipe") -> Iterator[Problem]:
    name = recipe.data.dataset_name
    if name in BUILTIN_DATA:
        return
    if not name.endswith(".jsonl"):
        message = f"expected {' or '.join(BUILTIN_DATA)}, or the path of a local .jsonl file"
        yield Problem("data.dataset_name", name, message)
    elif not Path(name).is_file():
        yield Problem("data.dataset_name", name, f"no such file (looked in {Path.cwd()})")


RULES = (
    _parallelism,
    _placement,
    _sections,
    _options,
    _stops,
    _variables,
    _worker_args,
    _frontend_args,
    _data,
)

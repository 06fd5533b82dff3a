"""A recipe: YAML with the guide's keys, `defaults:` parents and `key=value` overrides, validated into models.

What single keys may hold is said here; what keys may hold together is in `rules`, what becomes of engine options in
`options`.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from functional.runtime.errors import ConfigError
from functional.runtime.options import classify, nearest_key
from functional.runtime.redact import redacted, scrub
from functional.runtime.rules import (
    RULES,
    Problem,
    Rule,
    UnreadKeyError,
    find_cautions,
    find_problems,
    find_unsendable,
)

MISSING = "???"
"""OmegaConf's mark for a value that must still be given."""
RouterMode = Literal["kv", "round-robin", "random", "power-of-two", "least-loaded", "device-aware-weighted"]


GENERATION_HINTS = {
    "backend": "the managed runtime is dynamo",
    "dynamo_cfg.engine": "the managed engine is vllm",
    "dynamo_cfg.metrics_include_prefixes": "set metrics_worker_prefixes and metrics_frontend_prefixes instead",
    "dynamo_cfg.metrics_exclude_prefixes": "set metrics_worker_prefixes and metrics_frontend_prefixes instead",
    "vllm_cfg.precision": "generation runs in bfloat16 only",
    "vllm_cfg.kv_cache_dtype": "the cache has the model's precision, set auto",
    "temperature": "must be from 0.01 to 2: Dynamo's API takes none above, and vLLM raises lower ones to 0.01 unseen",
    "top_p": "must be 1.0: the trainer scores the whole distribution",
    "top_k": "must be null: the trainer scores the whole distribution",
}
HINTS = {f"policy.generation.{key}": hint for key, hint in GENERATION_HINTS.items()}
"""Said instead of pydantic's words, by key path."""


class Section(BaseModel):
    """Unknown keys are errors, so that a misspelt option never passes unseen."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_a_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """`true` is no 1, which it would pass for."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and not {int, float}.isdisjoint((annotation, *get_args(annotation))):
            raise PydanticCustomError("number", "expected a number")
        return value

    if not TYPE_CHECKING:  # to mypy every attribute would be there

        def __getattr__(self, name: str) -> Any:
            """Called for a key that has no value, because the one it was given is at fault (see `_read`)."""
            if name in type(self).model_fields:
                raise UnreadKeyError(name)
            return super().__getattr__(name)


class OpenSection(Section):
    """Unknown keys are kept: `options` and `rules` say what becomes of them."""

    model_config = ConfigDict(extra="allow", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    def options(self) -> dict[str, Any]:
        """Every key, declared or not, with its value."""
        declared = {name: getattr(self, name) for name in type(self).model_fields if name in self.__dict__}
        return declared | (self.model_extra or {})


class WorkerArgs(Section):
    """`dynamo_cfg.worker_args`: flags of `dynamo.vllm` itself. `extra_cli_args` go behind all others."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    enable_structural_tag: bool = False
    structural_tag_scope: Literal["auto", "always"] = "auto"
    structural_tag_schema: Literal["auto", "strict"] = "auto"
    custom_jinja_template: str | None = None
    endpoint_types: list[Literal["chat", "completions"]] = ["chat", "completions"]
    extra_cli_args: list[str] = []


class FrontendArgs(Section):
    """`dynamo_cfg.frontend_args`: flags of `dynamo.frontend`; the tokenizer's cache is set by its variables."""

    router_mode: RouterMode = "kv"
    router_reset_states: bool = True
    tokenizer: Literal["default", "fastokens"] = "default"
    tokenizer_cache: bool = False
    tokenizer_cache_bytes: int = Field(50 * 1024**2, ge=1)
    extra_cli_args: list[str] = []


class DynamoConfig(Section):
    """`policy.generation.dynamo_cfg`: the managed Dynamo runtime. Times in seconds."""

    engine: Literal["vllm"] = "vllm"
    startup_timeout_s: float = Field(300, gt=0)
    request_timeout_s: float = Field(60, gt=0)
    control_timeout_s: float = Field(60, gt=0)
    update_attempts: int = Field(3, ge=1)
    metrics_interval_s: float = Field(5, gt=0)
    metrics_worker_prefixes: list[str] = ["vllm:", "dynamo_component_"]
    metrics_frontend_prefixes: list[str] = ["dynamo_frontend_", "dynamo_component_router_"]
    metrics_include_prefixes: None = None
    metrics_exclude_prefixes: None = None
    worker_args: WorkerArgs = WorkerArgs()
    frontend_args: FrontendArgs = FrontendArgs()


class VllmConfig(OpenSection):
    """`policy.generation.vllm_cfg`. `env_vars` go to every worker; write a secret there as `${oc.env:NAME}`.

    vllm_metrics_logger_interval: NeMo RL's name for `dynamo_cfg.metrics_interval_s`; seconds.
    """

    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)
    precision: Literal["bfloat16"] = "bfloat16"
    kv_cache_dtype: Literal["auto"] = "auto"
    max_model_len: int = Field(512, ge=2)
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    load_format: Literal["auto", "dummy"] = "dummy"
    enforce_eager: bool = True
    enable_vllm_metrics_logger: bool = True
    vllm_metrics_logger_interval: float | None = Field(None, gt=0)
    env_vars: dict[str, str] = {}


class VllmKwargs(OpenSection):
    """`policy.generation.vllm_kwargs`: any flag of the engine, by its name with underscores."""

    block_size: int = Field(16, ge=8)
    max_num_seqs: int = Field(64, ge=1)


class Resources(Section):
    gpus_per_node: int = Field(1, ge=1)
    num_nodes: int = Field(1, ge=1)


class Colocated(Section):
    enabled: bool = False
    resources: Resources = Resources()


class GenerationConfig(OpenSection):
    """`policy.generation`. `top_p` and `top_k` have one value each: the trainer scores the whole distribution."""

    backend: Literal["dynamo"] = "dynamo"
    max_new_tokens: int = Field(8, ge=1)
    temperature: float = Field(1.0, ge=0.01, le=2)
    top_p: float = Field(1.0, ge=1, le=1)
    top_k: None = None
    stop_token_ids: list[Annotated[int, Field(strict=True, ge=0, lt=2**32)]] | None = None
    stop_strings: list[str] | None = None
    dynamo_cfg: DynamoConfig = DynamoConfig()
    vllm_cfg: VllmConfig = VllmConfig()
    vllm_kwargs: VllmKwargs = VllmKwargs()
    colocated: Colocated = Colocated()

    @property
    def metrics_interval_s(self) -> float | None:
        """Seconds from one reading of the fleet's metrics to the next; None when they are read at the end only."""
        if not self.vllm_cfg.enable_vllm_metrics_logger:
            return None
        return self.vllm_cfg.vllm_metrics_logger_interval or self.dynamo_cfg.metrics_interval_s


class OptimizerConfig(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    weight_decay: float = Field(0.0, ge=0)


class PolicyConfig(Section):
    """`policy`: `model_name` is a local directory, a hub name, `builtin:arithmetic`, or `builtin:random-0.6b`."""

    model_name: str
    max_grad_norm: float = Field(1.0, gt=0)
    micro_batch_size: int | None = Field(None, ge=1)
    optimizer: OptimizerConfig
    generation: GenerationConfig


class GrpoConfig(Section):
    num_prompts_per_step: int = Field(8, ge=1)
    num_generations_per_prompt: int = Field(8, ge=2)
    max_num_steps: int = Field(2, ge=1)
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    seed: int = 42


class LossConfig(OpenSection):
    """`loss_fn`, the names NeMo RL's recipes use. `rules` says which combinations the suite's trainer can do."""

    ratio_clip_min: float = Field(0.2, ge=0)
    ratio_clip_max: float = Field(0.2, ge=0)
    reference_policy_kl_penalty: float = Field(0.0, ge=0)
    use_importance_sampling_correction: bool = True
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = Field(2.0, gt=0)
    token_level_loss: bool = True


class ClusterConfig(Section):
    """`cluster`: `share_gpu` puts trainer and worker on one device, a test topology only."""

    gpus_per_node: int = Field(2, ge=1)
    num_nodes: int = Field(1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    share_gpu: bool = False


class DataConfig(Section):
    """`data`: `arithmetic`, `token_set` (rewards the share of completion tokens in a fixed set), or a local JSONL."""

    dataset_name: str = "arithmetic"


class WandbConfig(Section):
    project: str = "dynamo-rl"
    name: str | None = None


class LoggerConfig(Section):
    """`logger`: TensorBoard events go to the run's folder; Weights & Biases needs its package and an account."""

    log_dir: str | None = None
    tensorboard_enabled: bool = True
    wandb_enabled: bool = False
    wandb: WandbConfig = WandbConfig()


class Thresholds(Section):
    """`checks`: what the suite demands of a run. A bound left null is calibrated on the run's own model and engine
    (docs/refit.md); token_mult_prob_error is a mean of exp(|nats|), logprob_noise nats, shift_over_noise a ratio."""

    token_mult_prob_error: float | None = Field(None, gt=1)
    logprob_noise: float | None = Field(None, gt=0)
    shift_over_noise: float | None = Field(None, gt=0)
    require_reward_variance: bool = True


class FaultConfig(Section):
    """`faults`: for fault tests only.

    break_connections: chance that a request or answer breaks on its way. pause_send_s: holds a transfer open after
    `pause_send_after` tensors, at the update to policy version `pause_send_version`, so that something can be killed in
    the middle of it.
    """

    pause_send_version: int | None = None
    pause_send_after: int = Field(5, ge=0)
    pause_send_s: float = Field(20, ge=0)
    break_connections: float = Field(0.0, ge=0, le=0.9)


class Recipe(Section):
    policy: PolicyConfig
    grpo: GrpoConfig = GrpoConfig()
    loss_fn: LossConfig = LossConfig()
    cluster: ClusterConfig = ClusterConfig()
    data: DataConfig = DataConfig()
    logger: LoggerConfig = LoggerConfig()
    checks: Thresholds = Thresholds()
    faults: FaultConfig = FaultConfig()

    @property
    def devices_per_engine(self) -> int:
        """Devices of one engine group: tensor × pipeline parallel size."""
        vllm = self.policy.generation.vllm_cfg
        return vllm.tensor_parallel_size * vllm.pipeline_parallel_size

    @property
    def num_engines(self) -> int:
        """Number of `dynamo.vllm` workers."""
        resources = self.policy.generation.colocated.resources
        return resources.gpus_per_node * resources.num_nodes // self.devices_per_engine

    def shown(self) -> dict[str, Any]:
        """The recipe as plain data for printing and storing: secrets replaced."""
        return redacted(self.model_dump(mode="json"))

    def warnings(self) -> list[str]:
        """What is ignored although it was asked for, would not run, or needs care; one line each."""
        options = classify(self.policy.generation, self.cluster.device)
        ignored = [Problem(option.path, option.value, option.warning) for option in options if option.warning]
        return [str(problem) for problem in ignored + find_unsendable(self) + find_cautions(self)]

    def scrub(self, text: str) -> str:
        """`text` without this recipe's secrets."""
        return scrub(text, self.model_dump(mode="json"))


class RecipeError(ConfigError):
    """A recipe breaks rules; `problems` has them all."""

    def __init__(self, source: Path, problems: list[Problem]) -> None:
        super().__init__(f"{source}: " + "; ".join(map(str, problems)))
        self.problems = problems


def load_recipe(path: Path, overrides: list[str] | None = None, rules: Sequence[Rule] = RULES) -> Recipe:
    """Read `path`, its parents (`defaults:`, relative to it) and dot-list `overrides`.

    Raises ConfigError, one line, naming file, key path and value; RecipeError, with every problem of keys and rules,
    when keys are the cause.
    """
    merged = _read_with_parents(path, ())
    for override in overrides or ():
        merged = _merge(merged, _read_override(override))
    try:
        plain, unresolved = _resolve(OmegaConf.create(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    recipe, problems = _read(plain, unresolved)
    problems += find_problems(recipe, rules)
    if problems:
        raise RecipeError(path, problems)
    return recipe


def _read_override(override: str) -> Any:
    key, equals, _ = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r}: expected key=value, for example grpo.max_num_steps=3")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([override]), resolve=False)
    except Exception as error:  # the value stays out of the message: it may be a secret
        raise ConfigError(f"override {key}=…: its value is no YAML: {_one_line(error)}") from error


def _resolve(merged: Any) -> tuple[dict[str, Any], list[Problem]]:
    """The recipe as plain data, and the keys whose `${…}` leads nowhere (null in it) or whose value is still `???`."""
    unresolved: list[Problem] = []
    while True:
        try:
            plain = OmegaConf.to_container(merged, resolve=True)
            return plain, unresolved + list(_missing(plain))
        except InterpolationResolutionError as error:
            key = error.full_key
            if not key or key in [problem.key for problem in unresolved]:
                raise
            unresolved.append(Problem(key, None, _one_line(error).split(" full_key:")[0], has_value=False))
            OmegaConf.update(merged, key, None)


def _missing(section: dict[Any, Any] | list[Any], where: str = "") -> Iterator[Problem]:
    for key, value in section.items() if isinstance(section, dict) else enumerate(section):
        if value == MISSING:
            yield Problem(f"{where}{key}", None, "has no value: ??? stands for one to be given", has_value=False)
        elif isinstance(value, dict | list):
            yield from _missing(value, f"{where}{key}.")


def _read(plain: dict[str, Any], unresolved: list[Problem]) -> tuple[Recipe, list[Problem]]:
    """The recipe as far as it can be read, and what is wrong with its single keys.

    A key at fault is left out of the recipe, not replaced by its default: a rule that asks for it has nothing to judge,
    while all other rules are judged.
    """
    rest = copy.deepcopy(plain)
    problems: dict[tuple[int | str, ...], Problem] = {}
    unread: set[tuple[str, ...]] = set()
    for problem in unresolved:
        where = tuple(re.split(r"[.\[]", problem.key))
        problems[where] = problem
        if key := _leave_out(rest, where):
            unread.add(key)
    while True:
        try:
            recipe = Recipe.model_validate(rest)
        except ValidationError as error:
            for detail in error.errors():
                where = detail["loc"]
                if not any(where[:depth] in problems for depth in range(1, len(where))):  # a stand-in lacks its keys
                    problems.setdefault(where, _problem(detail))
                if key := _leave_out(rest, where):
                    unread.add(key)
        else:
            break
    for key in sorted(unread, key=len):  # a section before what was in it: then nothing of a default is touched
        _forget(recipe, key)
    return recipe, list(problems.values())


def _forget(section: Section, key: Sequence[str]) -> None:
    """Take the value of a key out of a recipe that was just read."""
    name, *within = key
    if not within:
        section.__dict__.pop(name, None)
    elif name in section.__dict__:
        _forget(section.__dict__[name], within)


def _leave_out(rest: Any, where: Sequence[Any]) -> tuple[str, ...] | None:
    """Take what pydantic has found fault with out of `rest`; a required key gets a stand-in.

    Returns the path of the key that has no value now; None for an unknown key, and for one entry of a mapping.
    """
    model: Any = Recipe
    section, depth = rest, 0
    while depth < len(where) - 1:
        inner = _section_of(model.model_fields.get(where[depth]))
        if inner is None or not isinstance(section.get(where[depth]), dict):
            break
        model, section, depth = inner, section[where[depth]], depth + 1
    name, within = where[depth], where[depth + 1 :]
    if within and isinstance(section.get(name), dict):
        section[name].pop(within[0], None)
        return None
    field = model.model_fields.get(name)
    if field is not None and field.is_required():
        section[name] = {} if _section_of(field) else _STAND_INS[field.annotation]
    else:
        section.pop(name, None)
    return None if field is None else tuple(where[: depth + 1])


_STAND_INS: dict[Any, Any] = {str: "", float: 1.0}
"""Values for required keys, by type: only a reading that fails uses them, and no rule sees them."""


def _problem(detail: Any) -> Problem:
    """One of pydantic's errors as ours: with the value at fault, and the nearest key where one is not known."""
    where = [str(part) for part in detail["loc"] if not _is_tag(part)]
    key = ".".join(where) or "recipe"
    if detail["type"] == "missing":
        return Problem(key, None, detail["msg"], has_value=False)
    message = HINTS.get(key, detail["msg"])
    if detail["type"] == "extra_forbidden":
        message = "unknown key" + nearest_key(where[-1], _known_keys(where[:-1]))
    return Problem(key, detail["input"], message, has_value=bool(detail["loc"]))


def _is_tag(part: Any) -> bool:
    """Pydantic names the branch of a union (`list[str]`, `function-…`) among the keys."""
    return isinstance(part, str) and ("[" in part or "(" in part)


def _known_keys(where: list[str]) -> Iterator[str]:
    model: Any = Recipe
    for name in where:
        model = _section_of(model.model_fields.get(name))
        if model is None:
            return
    yield from model.model_fields


def _section_of(field: FieldInfo | None) -> Any:
    """The model that a field holds, None for a field of another kind or an unknown one."""
    if field is None:
        return None
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _read_with_parents(path: Path, seen: tuple[Path, ...]) -> Any:
    resolved = path.resolve()
    if resolved in seen:
        raise ConfigError(f"{path}: `defaults` leads back to itself")
    try:
        loaded = OmegaConf.load(path)
        own = OmegaConf.to_container(loaded, resolve=False)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe (the image's are in /opt/functional/recipes)") from error
    except Exception as error:
        raise ConfigError(f"{path}: not a YAML recipe: {_one_line(error)}") from error
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, found {type(own).__name__}")
    merged: dict[Any, Any] = {}
    for name in _parents(path, loaded):
        merged = _merge(merged, _read_with_parents(path.parent / name, (*seen, resolved)))
    own.pop("defaults", None)
    return _merge(merged, own)


def _parents(path: Path, loaded: Any) -> list[str]:
    try:
        given = loaded.get("defaults")
        given = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: defaults: {_one_line(error)}") from error
    names = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{path}: defaults={given!r}: expected the name of a parent recipe, or a list of names")
    return names


def _merge(earlier: Any, later: Any) -> Any:
    """Sections key by key; anything else `later` replaces, whatever it was, and what it may be is judged afterwards."""
    if not (isinstance(earlier, dict) and isinstance(later, dict)):
        return later
    return earlier | {key: _merge(earlier[key], value) if key in earlier else value for key, value in later.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

"""What single keys of a recipe may hold: one model a section, the names those of the guide.

What keys may hold together is in `rules`; how a file becomes a recipe is in `load`.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from functional.engine.transports import TRANSPORTS, ProofKind, Transport
from functional.runtime.recipe.architectures import Layout
from functional.runtime.recipe.options import Option, classify
from functional.runtime.recipe.redact import redacted, scrub

RouterMode = Literal["kv", "round-robin", "random", "power-of-two", "least-loaded", "device-aware-weighted", "direct"]


class UnreadKeyError(Exception):
    """Something asked for a key that has no value, because the one it was given is at fault and is reported already."""


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
            """Called for a key that has no value, because the one it was given is at fault (see `load`)."""
            if name in type(self).model_fields:
                raise UnreadKeyError(name)
            return super().__getattr__(name)


class OpenSection(Section):
    """Unknown keys are kept: `options` and `rules` say what becomes of them."""

    model_config = ConfigDict(extra="allow", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    def entries(self) -> dict[str, Any]:
        """Every key, declared or not, with its value."""
        declared = {name: getattr(self, name) for name in type(self).model_fields if name in self.__dict__}
        return declared | (self.model_extra or {})


def _full_name(value: Any) -> Any:
    return "bfloat16" if isinstance(value, str) and value.lower() in ("bf16", "bfloat16") else value


def _nothing_is_empty(value: Any) -> Any:
    return {} if value is None else value


def _all_is_null(value: Any) -> Any:
    return None if value == -1 else value


def _device_here() -> Literal["cpu", "cuda"]:
    return "cuda" if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() else "cpu"


class WorkerArgs(Section):
    """`dynamo_cfg.worker_args`: flags of `dynamo.vllm` itself. `extra_cli_args` go behind all others."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    enable_structural_tag: bool = False
    structural_tag_scope: Literal["auto", "always"] = "auto"
    structural_tag_schema: Literal["auto", "strict"] = "auto"
    custom_jinja_template: str | None = None
    endpoint_types: list[Literal["chat", "completions"]] = Field(["chat", "completions"], min_length=1)
    extra_cli_args: list[str] = []

    @property
    def served_endpoints(self) -> list[str]:
        """endpoint_types, and completions, which rollouts and probes use."""
        return list(dict.fromkeys([*self.endpoint_types, "completions"]))


class FrontendArgs(Section):
    """`dynamo_cfg.frontend_args`: flags of `dynamo.frontend`; the tokenizer's cache is set by its variables."""

    router_mode: RouterMode = "kv"
    router_reset_states: bool = True
    tokenizer: Literal["default", "fastokens"] = "default"
    tokenizer_cache: bool = False
    tokenizer_cache_bytes: int = Field(50 * 1024**2, ge=1)
    extra_cli_args: list[str] = []


class DynamoConfig(Section):
    """`policy.generation.dynamo_cfg`: the managed Dynamo runtime. Times in seconds.

    metrics_include_prefixes: NeMo RL's name for prefixes of workers and frontend alike; null leaves each their own.
    metrics_exclude_prefixes: of names that are left out all the same.
    proof: what weights are proved by; null is sha256 on cpu and nh on cuda (docs/refit.md).
    max_inflight_requests: rollouts under way at a time; null for all that there are. chat_host, chat_port: where the
    chat server listens, with `vllm_cfg.expose_http_server`; port 0 for one that is free.
    """

    engine: Literal["vllm"] = "vllm"
    startup_timeout_s: float = Field(600, gt=0)
    request_timeout_s: float = Field(900, gt=0)
    control_timeout_s: float = Field(600, gt=0)
    update_attempts: int = Field(3, ge=1)
    proof: ProofKind | None = None
    max_inflight_requests: int | None = Field(None, ge=1)
    chat_host: str = "127.0.0.1"
    chat_port: int = Field(0, ge=0, lt=2**16)
    metrics_interval_s: float = Field(5, gt=0)
    metrics_worker_prefixes: list[str] = ["vllm:", "dynamo_component_"]
    metrics_frontend_prefixes: list[str] = ["dynamo_frontend_", "dynamo_component_router_"]
    metrics_include_prefixes: list[str] | None = None
    metrics_exclude_prefixes: list[str] | None = None
    worker_args: WorkerArgs = WorkerArgs()
    frontend_args: FrontendArgs = FrontendArgs()

    @property
    def read_of_workers(self) -> list[str]:
        """Prefixes of the worker metrics that are kept."""
        given = self.metrics_include_prefixes
        return self.metrics_worker_prefixes if given is None else given

    @property
    def read_of_frontend(self) -> list[str]:
        """Prefixes of the frontend metrics that are kept."""
        given = self.metrics_include_prefixes
        return self.metrics_frontend_prefixes if given is None else given


class VllmConfig(OpenSection):
    """`policy.generation.vllm_cfg`. `env_vars` go to every worker; write a secret there as `${oc.env:NAME}`.

    vllm_metrics_logger_interval: NeMo RL's name for `dynamo_cfg.metrics_interval_s`; seconds. expose_http_server: serve
    chat (docs/chat.md).
    """

    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)
    precision: Annotated[Literal["bfloat16"], BeforeValidator(_full_name)] = "bfloat16"
    kv_cache_dtype: Literal["auto"] = "auto"
    max_model_len: int = Field(512, ge=2)
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    load_format: str = "dummy"
    enforce_eager: bool = True
    expose_http_server: bool = False
    enable_vllm_metrics_logger: bool = True
    vllm_metrics_logger_interval: float | None = Field(None, gt=0)
    env_vars: Annotated[dict[str, str], BeforeValidator(_nothing_is_empty)] = {}


class VllmKwargs(OpenSection):
    """`policy.generation.vllm_kwargs`: any flag of the engine, by its name with underscores."""

    block_size: int = Field(16, ge=8)
    max_num_seqs: int = Field(64, ge=1)


class Resources(Section):
    """`colocated.resources`: nodes with engines, null for all, and the devices that engines take on each, null for all
    that the trainer leaves."""

    gpus_per_node: int | None = Field(1, ge=1)
    num_nodes: int | None = Field(None, ge=1)


class Colocated(Section):
    enabled: bool = False
    resources: Resources = Resources()


class GenerationConfig(OpenSection):
    """`policy.generation`. The trainer scores what `top_p` and `top_k` leave, as the engine does; −1 is null. `val_*`:
    of validation; null is as in training."""

    backend: Literal["dynamo"] = "dynamo"
    max_new_tokens: int = Field(8, ge=1)
    temperature: float = Field(1.0, ge=0.01, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Annotated[Annotated[int, Field(strict=True, ge=1)] | None, BeforeValidator(_all_is_null)] = None
    val_temperature: float | None = Field(None, ge=0, le=2)
    val_top_p: float | None = Field(None, gt=0, le=1)
    val_top_k: Annotated[Annotated[int, Field(strict=True, ge=1)] | None, BeforeValidator(_all_is_null)] = None
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
    """`policy.optimizer`, flat, or as NeMo RL has it: `name: torch.optim.AdamW` and `kwargs`. betas and eps: AdamW's;
    momentum: SGD's."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)


class SchedulerStage(Section):
    """A part of the learning rate's course: one of torch's schedulers and its arguments."""

    name: Literal[
        "torch.optim.lr_scheduler.LinearLR",
        "torch.optim.lr_scheduler.ConstantLR",
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "torch.optim.lr_scheduler.ExponentialLR",
        "torch.optim.lr_scheduler.StepLR",
    ]
    kwargs: dict[str, float] = {}


class SchedulerConfig(Section):
    """`policy.scheduler`: stages of the learning rate, each from its milestone (optimizer steps) on. NeMo RL's list,
    `[{name, kwargs}, …, {milestones}]`, is one too."""

    stages: list[SchedulerStage] = []
    milestones: list[int] = []


class PolicyConfig(Section):
    """`policy`: `model_name` is a local directory, a hub name, or one of the built-in models. max_grad_norm: null clips
    no gradient."""

    model_name: str
    max_grad_norm: float | None = Field(1.0, gt=0)
    micro_batch_size: int | None = Field(None, ge=1)
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig | None = None
    generation: GenerationConfig


class AsyncGrpoConfig(Section):
    """`grpo.async_grpo`: generation for later steps beside training.

    max_trajectory_age_steps: policy versions that a sample may be behind the one that is trained;
    max_generation_failures: samples that may be lost for good, which is none here; in_flight_weight_updates: updates do
    not wait for the rollouts under way; recompute_kv_cache_after_weight_updates: what either value says, caches are
    cleared with each update.
    """

    enabled: bool = False
    max_trajectory_age_steps: int = Field(1, ge=1)
    max_generation_failures: int = Field(0, ge=0)
    in_flight_weight_updates: bool = False
    recompute_kv_cache_after_weight_updates: bool = True


class GrpoConfig(Section):
    """`grpo`. Advantages are clipped to [advantage_clip_low, advantage_clip_high] last; null leaves a side open.

    Validation follows every val_period steps from val_start_at on (0: none), on max_val_samples prompts (null: all);
    once stop_at_validation_metric has reached its threshold the run ends.
    """

    num_prompts_per_step: int = Field(8, ge=1)
    num_generations_per_prompt: int = Field(8, ge=2)
    max_num_steps: int = Field(2, ge=1)
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    val_period: int = Field(0, ge=0)
    val_start_at: int = -1
    val_at_start: bool = False
    val_at_end: bool = False
    max_val_samples: int | None = Field(256, ge=1)
    val_num_generations_per_prompt: int = Field(1, ge=1)
    stop_at_validation_metric: Literal["accuracy", "pass_k", "avg_length"] | None = None
    stop_at_validation_threshold: float | None = None
    async_grpo: Annotated[AsyncGrpoConfig, BeforeValidator(_nothing_is_empty)] = AsyncGrpoConfig()
    seed: int = 42


class LossConfig(OpenSection):
    """`loss_fn`, the names NeMo RL's recipes use. `rules` says which combinations the suite's trainer can do.

    The ratio is clipped to [1 - ratio_clip_min, 1 + ratio_clip_max]. truncated_importance_sampling_type: what becomes
    of weights exp(old - generation) outside truncated_importance_sampling_ratio_min and _ratio, of which null leaves a
    side open: tis, as null, cuts them off, icepop makes them zero, seq-mask-tis makes those of whole samples zero by
    their geometric mean. token_level_loss: mean over all tokens of the batch;
    otherwise mean over samples of each sample's mean. reference_policy_kl_type: the estimator; kl_input_clamp_value
    bounds the log-ratio that it is given, either way, and kl_output_clamp_value its result.
    """

    ratio_clip_min: float = Field(0.2, ge=0)
    ratio_clip_max: float = Field(0.2, ge=0)
    reference_policy_kl_penalty: float = Field(0.0, ge=0)
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: float | None = Field(None, gt=0)
    kl_output_clamp_value: float | None = Field(None, gt=0)
    use_importance_sampling_correction: bool = True
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = Field(2.0, gt=0)
    truncated_importance_sampling_ratio_min: float | None = Field(None, ge=0)
    token_level_loss: bool = True


class ClusterConfig(Section):
    """`cluster`: `device` is cuda where this machine has NVIDIA's driver, unless it is given. `share_gpu` has trainer
    and engines take turns on the GPUs that there are, a test topology only: a shared one counts for each of them."""

    gpus_per_node: int = Field(2, ge=1)
    num_nodes: int = Field(1, ge=1)
    device: Literal["cpu", "cuda"] = Field(default_factory=_device_here)
    share_gpu: bool = False


class DataSource(Section):
    """`data.validation`: questions as `data` names them."""

    dataset_name: str
    input_key: str = "prompt"
    output_key: str = "answer"

    @property
    def keys(self) -> tuple[str, str]:
        """Of prompt and answer."""
        return self.input_key, self.output_key


class DataConfig(Section):
    """`data`: `arithmetic`, `token_set` (rewards the share of completion tokens in a fixed set), `tool_arithmetic`
    (agents that call tools), or a local JSONL, with the keys that hold a question's prompt and its answer. Questions
    for validation are those of `validation`, or, where it is null, the share split_validation_size of these, which is
    not trained on."""

    dataset_name: str = "arithmetic"
    input_key: str = "prompt"
    output_key: str = "answer"
    split_validation_size: float = Field(0, ge=0, lt=1)
    validation: DataSource | None = None

    @property
    def keys(self) -> tuple[str, str]:
        """Of prompt and answer."""
        return self.input_key, self.output_key


class CheckpointConfig(Section):
    """`checkpointing`: of the suite's trainer, every save_period steps and at the end, under checkpoint_dir (from the
    run's folder, where it is relative). A run resumes at the newest. Kept are that and the keep_top_k best by
    metric_name, `train:NAME` or `val:NAME`; null keeps all."""

    enabled: bool = False
    checkpoint_dir: str = "checkpoints"
    save_period: int = Field(10, ge=1)
    keep_top_k: int | None = Field(None, ge=1)
    metric_name: str | None = None
    higher_is_better: bool = True
    save_optimizer: bool = True
    model_save_format: str | None = "safetensors"
    checkpoint_must_save_by: str | None = None


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

    score_unfiltered: the trainer scores as if top_p and top_k cut nothing. break_connections: chance that a request or
    answer breaks on its way. pause_send_s: holds a transfer open after `pause_send_after` tensors, at the update to
    policy version `pause_send_version`, so that something can be killed in the middle of it.
    """

    pause_send_version: int | None = None
    pause_send_after: int = Field(5, ge=0)
    pause_send_s: float = Field(20, ge=0)
    score_unfiltered: bool = False
    break_connections: float = Field(0.0, ge=0, le=0.9)


class Recipe(Section):
    policy: PolicyConfig
    grpo: GrpoConfig = GrpoConfig()
    loss_fn: LossConfig = LossConfig()
    cluster: ClusterConfig = ClusterConfig()
    data: DataConfig = DataConfig()
    logger: LoggerConfig = LoggerConfig()
    checkpointing: CheckpointConfig = CheckpointConfig()
    checks: Thresholds = Thresholds()
    faults: FaultConfig = FaultConfig()
    _keys: tuple[Any, ...] = PrivateAttr(())

    @property
    def keys(self) -> tuple[Any, ...]:
        """`foreign_keys.Key` of each key that was translated or set aside when the recipe was read."""
        return self._keys

    def with_keys(self, keys: Sequence[Any]) -> Self:
        """This recipe, which was read from one with these other keys too."""
        self._keys = tuple(keys)
        return self

    @property
    def layout(self) -> Layout:
        """Of each engine."""
        vllm = self.policy.generation.vllm_cfg
        return Layout(vllm.tensor_parallel_size, vllm.pipeline_parallel_size, vllm.expert_parallel_size)

    @property
    def devices_per_engine(self) -> int:
        """Devices of one engine group: tensor × pipeline parallel size."""
        return self.layout.ranks

    @property
    def engine_nodes(self) -> int:
        """Number of nodes with engines."""
        return self.policy.generation.colocated.resources.num_nodes or self.cluster.num_nodes

    @property
    def engine_devices(self) -> int:
        """Devices that engines take on each of their nodes."""
        given = self.policy.generation.colocated.resources.gpus_per_node
        if given is not None:
            return given
        beside_trainer = self.engine_nodes >= self.cluster.num_nodes
        return max(1, self.cluster.gpus_per_node - beside_trainer)

    @property
    def trainer_ranks(self) -> int:
        """Devices of the first node that train: all that engines leave there. One the engines share counts twice."""
        engines = self.engine_devices if self.engine_nodes >= self.cluster.num_nodes else 0
        return max(1, self.cluster.gpus_per_node - engines)

    @property
    def num_engines(self) -> int:
        """Number of `dynamo.vllm` workers."""
        return self.engine_devices * self.engine_nodes // self.devices_per_engine

    @property
    def has_prefix_cache(self) -> bool:
        """Whether engines keep the blocks of prompts for later requests."""
        generation = self.policy.generation
        given = (_entries(generation, name).get("enable_prefix_caching") for name in ("vllm_cfg", "vllm_kwargs"))
        return not any(value is False for value in given)

    @property
    def transport(self) -> Transport:
        """How weights get from trainer to engines."""
        return TRANSPORTS[self.cluster.device]

    @property
    def proof(self) -> ProofKind:
        """What weights are proved by."""
        return self.policy.generation.dynamo_cfg.proof or self.transport.proof

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """What becomes of each key of `vllm_cfg` and `vllm_kwargs`, defaults included.

        Where `cluster.device` is at fault, every option counts, as on cuda; a section at fault has none. Raises
        UnreadKeyError where `policy.generation` is.
        """
        generation = self.policy.generation
        try:
            device: str = self.cluster.device
        except UnreadKeyError:
            device = "cuda"
        cfg, kwargs = (_entries(generation, name) for name in ("vllm_cfg", "vllm_kwargs"))
        return classify(cfg, kwargs, VllmConfig.model_fields, device)

    def shown(self) -> dict[str, Any]:
        """The recipe as plain data for printing and storing: secrets replaced."""
        return redacted(self.model_dump(mode="json"))

    def scrub(self, text: str) -> str:
        """`text` without this recipe's secrets."""
        return scrub(text, self.model_dump(mode="json"))


def _entries(generation: GenerationConfig, section: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = getattr(generation, section).entries()
    except UnreadKeyError:
        return {}
    return found

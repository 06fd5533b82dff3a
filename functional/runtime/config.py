"""A recipe: YAML with the guide's keys, `defaults:` parents and `key=value` overrides, validated into models."""

from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from functional.runtime.errors import ConfigError


class Section(BaseModel):
    """Unknown keys are errors, so that a misspelt option never passes unseen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
    worker_args: dict[str, Any] = {}
    frontend_args: dict[str, Any] = {"router_mode": "kv"}


class VllmConfig(Section):
    """`policy.generation.vllm_cfg`."""

    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)
    precision: Literal["bfloat16"] = "bfloat16"
    kv_cache_dtype: Literal["auto"] = "auto"
    max_model_len: int = Field(512, ge=2)
    block_size: int = Field(16, ge=8)
    max_num_seqs: int = Field(64, ge=1)
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    load_format: Literal["auto", "dummy"] = "dummy"
    enforce_eager: bool = True


class Resources(Section):
    gpus_per_node: int = Field(1, ge=1)
    num_nodes: int = Field(1, ge=1)


class Colocated(Section):
    enabled: bool = False
    resources: Resources = Resources()


class GenerationConfig(Section):
    """`policy.generation`."""

    backend: Literal["dynamo"] = "dynamo"
    max_new_tokens: int = Field(8, ge=1)
    temperature: float = Field(1.0, gt=0)
    dynamo_cfg: DynamoConfig = DynamoConfig()
    vllm_cfg: VllmConfig = VllmConfig()
    vllm_kwargs: dict[str, Any] = {}
    colocated: Colocated = Colocated()


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


class LossConfig(Section):
    """`loss_fn`, the names NeMo RL's recipes use."""

    ratio_clip_min: float = Field(0.2, ge=0)
    ratio_clip_max: float = Field(0.2, ge=0)
    reference_policy_kl_penalty: float = Field(0.0, ge=0)
    use_importance_sampling_correction: bool = True
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
    """`checks`: what the suite demands of a run."""

    token_mult_prob_error: float = Field(1.05, gt=1)
    logprob_noise: float = Field(0.05, gt=0)
    shift_over_noise: float = Field(10.0, gt=0)
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

    @model_validator(mode="after")
    def _topology(self) -> "Recipe":
        vllm = self.policy.generation.vllm_cfg
        if self.policy.generation.colocated.enabled:
            raise ValueError(
                "policy.generation.colocated.enabled=true: training and generation are never colocated here"
            )
        group = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
        inference = self.policy.generation.colocated.resources
        if group > inference.gpus_per_node:
            raise ValueError(
                f"policy.generation.vllm_cfg: a tensor×pipeline group of {group} does not fit the "
                f"{inference.gpus_per_node} GPU(s) of policy.generation.colocated.resources.gpus_per_node"
            )
        needed = 1 + inference.gpus_per_node * inference.num_nodes
        offered = self.cluster.gpus_per_node * self.cluster.num_nodes
        if needed > offered:
            raise ValueError(
                f"cluster.gpus_per_node={self.cluster.gpus_per_node}: one trainer and {needed - 1} generation "
                f"device(s) need {needed} (raise it, or set cluster.share_gpu=true and count the shared device twice)"
            )
        return self

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


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Read `path`, its parents (`defaults:`, relative to it) and dot-list `overrides`.

    Raises ConfigError, one line, naming file, key path and value.
    """
    merged = _read_with_parents(path, ())
    try:
        if overrides:
            for override in overrides:
                if "=" not in override:
                    raise ConfigError(f"override {override!r}: expected key=value, for example grpo.max_num_steps=3")
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist(overrides))
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    try:
        return Recipe.model_validate(plain)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc'])) or 'recipe'}: {problem['msg']}"
            + (f" (got {problem['input']!r})" if problem["loc"] and problem["type"] != "missing" else "")
            for problem in error.errors()
        ]
        raise ConfigError(f"{path}: {'; '.join(problems)}") from error


def _read_with_parents(path: Path, seen: tuple[Path, ...]) -> Any:
    resolved = path.resolve()
    if resolved in seen:
        raise ConfigError(f"{path}: `defaults` leads back to itself")
    try:
        own = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe (the image's are in /opt/functional/recipes)") from error
    except Exception as error:
        raise ConfigError(f"{path}: not a YAML recipe: {_one_line(error)}") from error
    if not OmegaConf.is_dict(own):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, found {type(OmegaConf.to_object(own)).__name__}")
    parents = own.pop("defaults", None)
    if parents is None:
        return own
    names = [parents] if isinstance(parents, str) else list(parents)
    return OmegaConf.merge(*[_read_with_parents(path.parent / name, (*seen, resolved)) for name in names], own)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

"""Keys of NeMo RL's recipes that `model` does not have: what becomes of each, section by section.

A key here is translated into one of ours, or set aside with the reason. Where setting it aside would change what is
trained, only values that ask for nothing pass. An entry holds for all that is below it, unless a deeper one says
otherwise. Sections of `policy.generation` and `loss_fn` have their own tables, in `options` and `rules`.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from functional.runtime.recipe.options import OptionClass
from functional.runtime.recipe.rules import Problem, as_yaml, is_same

ANYTHING = object()
"""As a value that asks for nothing: all of them do."""


@dataclass(frozen=True)
class Fate:
    """A class with its reason. off: values that ask for nothing; any other is refused."""

    kind: OptionClass
    reason: str
    off: tuple[Any, ...] = (ANYTHING,)


@dataclass(frozen=True)
class Key:
    """One key of a recipe and what became of it."""

    path: str
    value: Any
    kind: OptionClass
    outcome: str


def aside(reason: str) -> Fate:
    return Fate(OptionClass.INAPPLICABLE, reason)


def managed(reason: str) -> Fate:
    return Fate(OptionClass.MANAGED, reason)


def only(*off: Any, why: str) -> Fate:
    """Refused, unless it is one of these values or null."""
    return Fate(OptionClass.UNSUPPORTED, why, (None, *off))


OFF = only(False, why="the suite's trainer does not do that")
RANKS = "the suite's trainer divides weights and samples among its ranks (FSDP2), and nothing else"
MEMORY = "arranges the same samples in memory; the suite's trainer takes micro-batches of policy.micro_batch_size"
PLAIN_TEXT = "the suite's prompts are plain text, tokenized by the model's own tokenizer"
NO_GYM = "rewards come from the suite's own tasks, none is a NeMo Gym environment"
NO_SINK = "metrics go to metrics.jsonl, TensorBoard and Weights & Biases"
PORTS = managed("ports are taken outside the node's ephemeral range, by the runtime")
DYNAMIC = "dynamic sampling is off"
SHAPING = "rewards are used as the task gives them"

FATES: dict[str, Fate] = {
    "grpo.max_rollout_turns": only(1, why="the suite's tasks have one turn"),
    "grpo.max_num_epochs": aside("prompts are drawn by seed and step; grpo.max_num_steps ends a run"),
    "grpo.val_batch_size": aside("dynamo_cfg.max_inflight_requests bounds what is under way, validation too"),
    "grpo.overlong_filtering": OFF,
    "grpo.use_dynamic_sampling": OFF,
    "grpo.dynamic_sampling_max_gen_batches": aside(DYNAMIC),
    "grpo.batch_multiplier": aside(DYNAMIC),
    "grpo.reward_shaping": aside(SHAPING),
    "grpo.reward_shaping.enabled": OFF,
    "grpo.reward_scaling": aside(SHAPING),
    "grpo.reward_scaling.enabled": OFF,
    "grpo.adv_estimator": aside("settings of another estimator"),
    "grpo.adv_estimator.name": only("grpo", why="the suite's trainer has GRPO's advantages"),
    "grpo.seq_logprob_error_threshold": only(why="the suite's trainer leaves no sequence out"),
    "grpo.invalid_tool_call_advantage": only(why="the suite's tasks have no tool calls to penalize"),
    "grpo.malformed_thinking_advantage": only(why="the suite's tasks have no thinking tags to penalize"),
    "grpo.skip_reference_policy_logprobs_calculation": aside(
        "the reference is scored where loss_fn.reference_policy_kl_penalty asks for it, only"
    ),
    "grpo.calculate_advantages_on_gpu": aside("advantages are a few numbers, made on the CPU"),
    "grpo.deduplicate_multimodal_data": aside("rollouts are text"),
    "grpo.debug_payload_metrics": aside("rollouts are text"),
    "reward_penalties": aside(NO_GYM),
    "reward_penalties.penalize_duplicated_reasoning": OFF,
    "reward_penalties.penalize_empty_final_answer": OFF,
    "reward_penalties.penalize_unwanted_tokens": OFF,
    "reward_penalties.penalize_malformed_think_tag": OFF,
    "policy.tokenizer": aside(PLAIN_TEXT),
    "policy.hf_config_overrides": only({}, why="the engine loads the model's own configuration"),
    "policy.generation_batch_size": aside("the engine batches by itself (vllm_kwargs.max_num_seqs)"),
    "policy.logprob_batch_size": aside("log-probs are made in micro-batches of policy.micro_batch_size"),
    "policy.logprob_chunk_size": aside("logits are made where a completion token is predicted, only"),
    "policy.precision": only("bfloat16", "bf16", why="the policy computes in bfloat16, from float32 master weights"),
    "policy.offload_optimizer_for_logprob": aside(RANKS),
    "policy.dtensor_cfg": aside(RANKS),
    "policy.dtensor_cfg.tensor_parallel_size": only(1, why=RANKS),
    "policy.dtensor_cfg.context_parallel_size": only(1, why=RANKS),
    "policy.dtensor_cfg.lora_cfg.enabled": only(False, why="updates send whole weights, not adapters"),
    "policy.megatron_cfg": aside("settings of another trainer"),
    "policy.megatron_cfg.enabled": only(False, why="the suite's trainer is not Megatron"),
    "policy.draft": aside("the managed runtime has no speculative decoding"),
    "policy.draft.enabled": only(False, why="the managed runtime has no speculative decoding"),
    "policy.router_replay": aside("expert routes are not returned through Dynamo"),
    "policy.router_replay.enabled": only(False, why="expert routes are not returned through Dynamo"),
    "policy.reward_model_cfg": aside(NO_GYM),
    "policy.reward_model_cfg.enabled": OFF,
    "policy.pretrained_checkpoint": only(why="the model is loaded from policy.model_name"),
    "policy.dynamic_batching": aside(MEMORY),
    "policy.sequence_packing": aside(MEMORY),
    "policy.make_sequence_length_divisible_by": aside(RANKS),
    "policy.refit_buffer_size_gb": managed("updates use the buffers of the runtime's own protocol"),
    "policy.is_vlm": only(False, why="rollouts are text"),
    "policy.quant_cfg": only(why="generation runs in bfloat16, without quantization"),
    "policy.quant_calib_data": aside("nothing is quantized"),
    "policy.quant_calib_size": aside("nothing is quantized"),
    "policy.quant_batch_size": aside("nothing is quantized"),
    "policy.quant_sequence_length": aside("nothing is quantized"),
    "policy.disable_modelopt_layer_spec": aside("settings of another trainer"),
    "checkpointing.save_consolidated": aside("weights are one file, by the model's own names"),
    "checkpointing.ft_keep_latest_k": only(why="the newest is always kept"),
    "checkpointing.ft_save_period": only(why="checkpoints go by save_period"),
    "checkpointing.pretrained_checkpoint": only(why="the model is loaded from policy.model_name"),
    "checkpointing.model_cache_dir": aside("weights are one file, by the model's own names"),
    "checkpointing.model_repo_id": aside("weights are one file, by the model's own names"),
    "checkpointing.is_peft": only(False, why="updates send whole weights, not adapters"),
    "checkpointing.peft_config": aside("updates send whole weights, not adapters"),
    "checkpointing.is_async": aside("a checkpoint is written between steps"),
    "data.shuffle": aside("prompts are drawn by grpo.seed and step"),
    "data.num_workers": aside("the questions are read once, before the run"),
    "data.max_input_seq_length": aside("a prompt that fills the engine's context is refused, none is cut"),
    "data.use_multiple_dataloader": OFF,
    "data.num_prompts_per_dataloader": aside("there is one set of questions"),
    "data.custom_dataloader": only(why="there is one set of questions"),
    "data.add_bos": aside(PLAIN_TEXT),
    "data.add_eos": aside(PLAIN_TEXT),
    "data.add_generation_prompt": aside(PLAIN_TEXT),
    "data.add_system_prompt": aside(PLAIN_TEXT),
    "data.default": aside("prompts are the questions as they stand, rewarded by the suite's task"),
    "env": aside("the suite's tasks reward by themselves"),
    "env.should_use_nemo_gym": only(False, why=NO_GYM + "; a trainer with NeMo Gym takes the runtime's chat server"),
    "logger.num_val_samples_to_print": aside("samples are in rollouts.jsonl"),
    "logger.monitor_gpus": aside("the runtime reads the engines' and the frontend's metrics, not the devices'"),
    "logger.gpu_monitoring": aside("the runtime reads the engines' and the frontend's metrics, not the devices'"),
    "logger.tensorboard": aside("events go to logger.log_dir, or to the run's folder"),
    "logger.mlflow": aside(NO_SINK),
    "logger.mlflow_enabled": only(False, why=NO_SINK),
    "logger.swanlab": aside(NO_SINK),
    "logger.swanlab_enabled": only(False, why=NO_SINK),
    "logger.wandb.entity": aside("WANDB_ENTITY names it"),
    "logger.wandb.log_nemo_gym_full_result_tables": aside(NO_GYM),
    "cluster.master_port_range_low": PORTS,
    "cluster.master_port_range_high": PORTS,
    "cluster.segment_size": aside("nodes are taken by address, their own first"),
    "data_plane": aside("samples stay with the driver"),
    "data_plane.enabled": OFF,
    "on_policy_distillation": only(why="the suite's trainer has no teachers"),
    "async_rl": aside("of another controller"),
    "teacher": aside("of another algorithm"),
}
"""By key path; of `policy.generation` and `loss_fn` nothing, they have tables of their own."""

OPTIMIZERS = {"torch.optim.AdamW": "adamw", "torch.optim.SGD": "sgd"}
SAME_RESULT = ("foreach", "fused", "capturable", "maximize", "amsgrad", "nesterov", "dampening", "differentiable")
"""What torch's optimizers take besides; only values that change nothing pass."""


class Recast:
    """A recipe's plain data made ours: `rest` is what `model` is to read, `keys` what became of the others."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self.rest = copy.deepcopy(plain)
        self.keys: list[Key] = []
        self.problems: list[Problem] = []
        self._translate()
        self._set_aside(self.rest, "")

    def is_aside(self, path: str) -> bool:
        """Whether the key, or a section that it is in, is not read."""
        return any(path == key.path or path.startswith(f"{key.path}.") for key in self.keys if key.kind in UNREAD)

    def _set_aside(self, section: dict[Any, Any], where: str) -> None:
        for name in list(section):
            path, value = f"{where}{name}", section[name]
            if path in FATES:
                self._judge(path, section.pop(name), FATES[path])
            elif isinstance(value, dict) and any(known.startswith(f"{path}.") for known in FATES):
                self._set_aside(value, f"{path}.")

    def _judge(self, path: str, value: Any, above: Fate) -> None:
        """Record what is at `path` and below, and what of it is refused."""
        fate = FATES.get(path, above)
        if isinstance(value, dict) and value and ANYTHING in fate.off:
            for name, inner in value.items():
                self._judge(f"{path}.{name}", inner, fate)
            return
        self.keys.append(Key(path, value, fate.kind, f"ignored: {fate.reason}"))
        if ANYTHING not in fate.off and not any(is_same(value, off) for off in fate.off):
            self.problems.append(Problem(path, value, f"{fate.reason}: {_allowed(fate.off)}"))

    def _translate(self) -> None:
        policy, grpo = _section(self.rest, "policy"), _section(self.rest, "grpo")
        self._move(policy, "policy.train_micro_batch_size", policy, "policy.micro_batch_size")
        self._batch_size(policy, grpo)
        self._tokenizer(policy)
        self._context(policy)
        self._optimizer(policy)
        self._scheduler(policy)
        self._estimator(grpo)
        self._data(_section(self.rest, "data"))

    def _move(self, source: dict[str, Any], path: str, target: dict[str, Any], to: str) -> None:
        """A key under another name; where both are given, they must agree."""
        name, new = path.rpartition(".")[2], to.rpartition(".")[2]
        if name not in source:
            return
        value = source.pop(name)
        self._note(path, value, f"{to}")
        if value is None:
            return
        if target.get(new) not in (None, value):
            self.problems.append(Problem(path, value, f"{to}={target[new]!r} says otherwise: give one of them"))
        target.setdefault(new, value)

    def _note(self, path: str, value: Any, to: str) -> None:
        self.keys.append(Key(path, value, OptionClass.TRANSLATED, to))

    def _batch_size(self, policy: dict[str, Any], grpo: dict[str, Any]) -> None:
        path = "policy.train_global_batch_size"
        if "train_global_batch_size" not in policy:
            return
        given = policy.pop("train_global_batch_size")
        self._note(path, given, "one optimizer step takes all samples of a step")
        prompts, generations = (grpo.get(f"num_{name}", 8) for name in ("prompts_per_step", "generations_per_prompt"))
        if isinstance(prompts, int) and isinstance(generations, int) and given not in (None, prompts * generations):
            message = "the suite's trainer makes one optimizer step of all samples of a step: set it to "
            self.problems.append(Problem(path, given, f"{message}{prompts * generations}"))

    def _tokenizer(self, policy: dict[str, Any]) -> None:
        tokenizer = policy.get("tokenizer")
        name = tokenizer.get("name") if isinstance(tokenizer, dict) else None
        if name not in (None, policy.get("model_name")):
            message = "a policy has its model's own tokenizer: remove it, or set policy.model_name"
            self.problems.append(Problem("policy.tokenizer.name", name, message))

    def _context(self, policy: dict[str, Any]) -> None:
        if "max_total_sequence_length" not in policy:
            return
        value = policy.pop("max_total_sequence_length")
        to = "policy.generation.vllm_cfg.max_model_len"
        self._note("policy.max_total_sequence_length", value, f"{to}, where that is not given")
        vllm = _section(_section(policy, "generation"), "vllm_cfg")
        if value is not None:
            vllm.setdefault("max_model_len", value)

    def _optimizer(self, policy: dict[str, Any]) -> None:
        """`{name: torch.optim.AdamW, kwargs: {lr: …}}` as `{name: adamw, lr: …}`."""
        optimizer = policy.get("optimizer")
        if optimizer is None and "optimizer" in policy:
            del policy["optimizer"]
            message = "the suite's trainer needs one: give policy.optimizer.name and policy.optimizer.kwargs.lr"
            self.problems.append(Problem("policy.optimizer", None, message))
            policy["optimizer"] = {"lr": 1.0}  # a stand-in: the recipe is refused
        if not isinstance(optimizer, dict):
            return
        if isinstance(name := optimizer.get("name"), str) and name in OPTIMIZERS:
            optimizer["name"] = OPTIMIZERS[name]
            self._note("policy.optimizer.name", name, f"policy.optimizer.name={OPTIMIZERS[name]}")
        kwargs = optimizer.get("kwargs")
        if kwargs is None:
            optimizer.pop("kwargs", None)
            return
        if not isinstance(kwargs, dict):
            return  # the model says that it knows no such key
        del optimizer["kwargs"]
        for key in list(kwargs):
            path = f"policy.optimizer.kwargs.{key}"
            if key in SAME_RESULT:
                off = Fate(OptionClass.INAPPLICABLE, "results are those of the plain optimizer", (False, None, 0))
                if key in ("foreach", "fused"):
                    off = aside("the same steps, computed another way")
                self._judge(path, kwargs[key], off)
            else:
                self._move(kwargs, path, optimizer, f"policy.optimizer.{key}")

    def _scheduler(self, policy: dict[str, Any]) -> None:
        """A list of stages and, last, their milestones, or one stage, as `{stages: […], milestones: […]}`."""
        given = policy.get("scheduler")
        if isinstance(given, dict) and "name" in given:
            given = [given]
        if not isinstance(given, list):
            return
        stages = [stage for stage in given if not (isinstance(stage, dict) and "milestones" in stage)]
        milestones = [stage["milestones"] for stage in given if isinstance(stage, dict) and "milestones" in stage]
        self._note("policy.scheduler", policy["scheduler"], "policy.scheduler.stages and milestones")
        policy["scheduler"] = {"stages": stages, "milestones": milestones[0] if milestones else []}

    def _estimator(self, grpo: dict[str, Any]) -> None:
        estimator = grpo.get("adv_estimator")
        if isinstance(estimator, dict):
            for name in ("normalize_rewards", "use_leave_one_out_baseline"):
                self._move(estimator, f"grpo.adv_estimator.{name}", grpo, f"grpo.{name}")

    def _data(self, data: dict[str, Any]) -> None:
        """`data.train` and `data.validation` as `dataset_name` with its keys; a `data.dataset_name` comes first."""
        is_named = "dataset_name" in data
        for part in ("train", "validation"):
            given = data.get(part)
            if isinstance(given, list) and len(given) == 1:
                given = given[0]
            if not isinstance(given, dict):
                continue
            source = _source(given, data.get("default"))
            for key, value in given.items():
                path = f"data.{part}.{key}"
                if part == "train" and is_named:
                    self.keys.append(Key(path, value, OptionClass.INAPPLICABLE, "ignored: data.dataset_name is given"))
                elif key in ("dataset_name", "data_path", *SOURCE_KEYS):
                    self._note(path, value, "data" if part == "train" else "data.validation")
                else:
                    self.keys.append(Key(path, value, OptionClass.INAPPLICABLE, f"ignored: {_of_source(key)}"))
            if part == "validation":
                source.pop("split_validation_size", None)
                unresolved = "data_path" in given and "dataset_name" not in source
                data["validation"] = None if unresolved else source
            else:
                del data["train"]
                data.update({} if is_named else source)


UNREAD = (OptionClass.INAPPLICABLE, OptionClass.MANAGED)


SOURCE_KEYS = ("input_key", "output_key", "split_validation_size")


def _of_source(key: str) -> str:
    if key == "seed":
        return "questions are drawn by grpo.seed"
    return "questions are taken as they stand in the file, and rewarded by the suite's task"


def _source(given: dict[str, Any], default: Any) -> dict[str, Any]:
    """A data set's own keys, with what `data.default` says of them."""
    merged = {**(default if isinstance(default, dict) else {}), **given}
    kept = {key: merged[key] for key in SOURCE_KEYS if merged.get(key) is not None}
    if path := given.get("data_path"):
        return {"dataset_name": path, "input_key": "input", "output_key": "output"} | kept  # NeMo RL's defaults
    name = given.get("dataset_name") if "data_path" in given else merged.get("dataset_name")
    return kept if name is None else {"dataset_name": name, **kept}


def _allowed(off: tuple[Any, ...]) -> str:
    values = [as_yaml(value) for value in off if value is not None]
    return f"set {' or '.join(values)}" if values else "set null"


def _section(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """The section of this name; an empty one where there is none, or something else, which `model` refuses."""
    found = parent.get(name)
    return found if isinstance(found, dict) else {}


def known_below(where: str) -> Iterator[str]:
    """Names of the keys of the section at `where` that are in the table."""
    prefix = f"{where}." if where else ""
    return iter({path[len(prefix) :].partition(".")[0] for path in FATES if path.startswith(prefix)})

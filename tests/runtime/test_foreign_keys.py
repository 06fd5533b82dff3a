"""A recipe in NeMo RL's keys, with every section and type of theirs: taken as it stands, and each key accounted for."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from functional.runtime.recipe.foreign_keys import FATES
from functional.runtime.recipe.load import RecipeError, load_recipe
from functional.runtime.recipe.options import OptionClass

FOREIGN = Path(__file__).with_name("foreign.yaml")
OURS = ["policy.model_name=builtin:arithmetic", "data.dataset_name=arithmetic", "grpo.max_num_steps=2"]


@pytest.fixture
def recipe():
    return load_recipe(FOREIGN, OURS)


def test_it_is_taken_with_model_data_and_steps_overridden(recipe):
    policy, generation = recipe.policy, recipe.policy.generation
    assert (policy.micro_batch_size, policy.max_grad_norm) == (3, None)
    assert policy.optimizer.model_dump() == {
        "name": "adamw",
        "lr": 2e-3,
        "weight_decay": 0.02,
        "betas": (0.8, 0.98),
        "eps": 1e-7,
        "momentum": 0.0,
    }
    assert [stage.name.rpartition(".")[2] for stage in policy.scheduler.stages] == ["LinearLR", "ConstantLR"]
    assert policy.scheduler.milestones == [2]
    assert (recipe.grpo.advantage_clip_low, recipe.grpo.advantage_clip_high, recipe.grpo.seed) == (None, 9.5, 7)
    assert recipe.grpo.async_grpo.enabled
    assert recipe.grpo.async_grpo.max_trajectory_age_steps == 2
    assert generation.vllm_cfg.max_model_len == 96
    assert generation.vllm_cfg.precision == "bfloat16"
    assert generation.vllm_cfg.env_vars == {}
    assert generation.dynamo_cfg.worker_args.served_endpoints == ["chat", "completions"]
    assert generation.vllm_kwargs.entries() == {"block_size": 16, "max_num_seqs": 16}
    assert recipe.engine_devices == recipe.num_engines == 1
    assert recipe.loss_fn.reference_policy_kl_type == "k2"
    assert recipe.data.dataset_name == "arithmetic"


def test_time_outs_are_those_of_the_foreign_recipes_where_none_is_given(recipe):
    dynamo = recipe.policy.generation.dynamo_cfg
    assert (dynamo.startup_timeout_s, dynamo.request_timeout_s, dynamo.control_timeout_s) == (600, 900, 600)


def test_every_key_is_accounted_for(recipe):
    """Each leaf of the files is a field of the model, a key that was recast, an option, or one the rules know."""
    from functional.suite.show_config import shown_keys

    named = {key["path"] for key in shown_keys(recipe)} | {option.path for option in recipe.options}
    for path in written(FOREIGN):
        covered = any(path == one or path.startswith(f"{one}.") or one.startswith(f"{path}.") for one in named)
        assert covered, path
    for key in recipe.keys:
        assert key.kind in OptionClass
        assert key.outcome


def written(path):
    """Paths of what the fixture and its parent say."""
    for file in (path, path.with_name("foreign_parent.yaml")):
        yield from leaves(OmegaConf.to_container(OmegaConf.load(file)), "")


def leaves(section, where):
    for name, value in section.items():
        if name in ("defaults", "_override_", "compilation_config"):
            continue
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{where}{name}.")
        elif not f"{where}{name}".startswith(("policy.optimizer.kwargs", "policy.scheduler")):
            yield f"{where}{name}"


def test_the_fixture_has_every_key_of_the_table():
    seen = set(written(FOREIGN))
    absent = [
        path for path in FATES if not any(one == path or one.startswith((f"{path}.", f"{path}[")) for one in seen)
    ]
    assert set(absent) <= ABSENT


ABSENT = {
    "policy.quant_calib_data",
    "policy.quant_calib_size",
    "policy.quant_batch_size",
    "policy.quant_sequence_length",
    "policy.disable_modelopt_layer_spec",
    "data.num_prompts_per_dataloader",
    "data.custom_dataloader",
    "data.add_bos",
    "data.add_eos",
    "data.add_generation_prompt",
    "data.add_system_prompt",
    "env.should_use_nemo_gym",
    "logger.wandb.entity",
    "async_rl",
    "teacher",
}
"""Keys that no recipe has beside those of the fixture, or of one only where it is refused."""


REFUSED = [
    ("grpo.overlong_filtering=true", "grpo.overlong_filtering", "set false"),
    ("grpo.max_rollout_turns=4", "grpo.max_rollout_turns", "set 1"),
    ("grpo.seq_logprob_error_threshold=2", "grpo.seq_logprob_error_threshold", "set null"),
    ("grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.name", "set grpo"),
    ("grpo.adv_estimator.normalize_rewards=false", "grpo.adv_estimator.normalize_rewards", "says otherwise"),
    ("grpo.reward_scaling.enabled=true", "grpo.reward_scaling.enabled", "set false"),
    ("reward_penalties.penalize_unwanted_tokens=true", "reward_penalties.penalize_unwanted_tokens", "set false"),
    ("policy.train_global_batch_size=512", "policy.train_global_batch_size", "set it to 6"),
    ("policy.micro_batch_size=5", "policy.train_micro_batch_size", "says otherwise"),
    ("policy.tokenizer.name=another", "policy.tokenizer.name", "its model's own tokenizer"),
    ("policy.precision=float32", "policy.precision", "set bfloat16 or bf16"),
    ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.enabled", "not Megatron"),
    ("policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.tensor_parallel_size", "among its ranks"),
    ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.enabled", "adapters"),
    ("policy.optimizer=null", "policy.optimizer", "needs one"),
    ("policy.optimizer.name=torch.optim.Rprop", "policy.optimizer.name", "adamw"),
    ("policy.optimizer.kwargs.amsgrad=true", "policy.optimizer.kwargs.amsgrad", "plain optimizer"),
    ("policy.optimizer.kwargs.rho=1", "policy.optimizer.rho", "unknown key"),
    ("policy.hf_config_overrides={a: 1}", "policy.hf_config_overrides", "own configuration"),
    ("env.should_use_nemo_gym=true", "env.should_use_nemo_gym", "NeMo Gym"),
    ("logger.mlflow_enabled=true", "logger.mlflow_enabled", "set false"),
    ("data_plane.enabled=true", "data_plane.enabled", "set false"),
    ("on_policy_distillation={a: 1}", "on_policy_distillation", "teachers"),
    ("grpo.overlong_filterin=true", "grpo.overlong_filterin", "nearest known key is overlong_filtering"),
    ("policy.dtensor_cf={}", "policy.dtensor_cf", "nearest known key is dtensor_cfg"),
]


@pytest.mark.parametrize(("override", "key", "words"), REFUSED)
def test_what_would_change_what_is_trained_is_refused_alone(override, key, words):
    with pytest.raises(RecipeError) as caught:
        load_recipe(FOREIGN, [*OURS, override])
    assert [problem.key for problem in caught.value.problems] == [key]
    assert words in str(caught.value)


def test_an_override_may_have_hydras_marks():
    recipe = load_recipe(FOREIGN, [*OURS, "++policy.generation.temperature=0.5", "+grpo.seed=3"])
    assert (recipe.policy.generation.temperature, recipe.grpo.seed) == (0.5, 3)


def test_an_unresolved_key_that_is_set_aside_is_no_problem():
    assert load_recipe(FOREIGN, [*OURS, "data.train.data_path=${oc.env:NO_SUCH_HOME}/a.jsonl"])


def test_data_of_a_path_that_leads_nowhere_is_one_problem_each():
    nowhere = [
        f"data.{part}={{_override_: true, data_path: '${{oc.env:NO_SUCH_HOME}}/a.jsonl'}}"
        for part in ("train", "validation")
    ]
    with pytest.raises(RecipeError) as caught:
        load_recipe(FOREIGN, [OURS[0], *nowhere])
    assert [problem.key for problem in caught.value.problems] == ["data.train.data_path", "data.validation.data_path"]


def test_data_of_a_path_has_the_foreign_names_of_keys(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"input": "1+1=", "output": "2"}\n')
    recipe = load_recipe(FOREIGN, [OURS[0], f"data.train.data_path={questions}"])
    assert (recipe.data.dataset_name, recipe.data.input_key, recipe.data.output_key) == (
        str(questions),
        "input",
        "output",
    )

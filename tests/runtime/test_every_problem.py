"""Everything that is wrong with a recipe is said at once, and nothing that is not."""

import json
import math
import random
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.load import RecipeError, load_recipe
from functional.runtime.recipe.model import Recipe

FAULTY = """
policy:
  model_name: {model}
  optimizer: {{lr: 0.1, momentun: 0.9}}
  generation:
    backend: dynamo
    temperature: 2.5
    top_p: 1.95
    top_k: 0
    dynamo_cfg:
      engine: vllm
      metrics_interval_s: 5
      frontend_args: {{router_mode: kvv}}
      worker_args: {{extra_cli_args: [--seed=3]}}
    vllm_cfg:
      tensor_parallel_size: 2
      pipeline_parallel_size: 1
      expert_parallel_size: 1
      precision: fp8
      kv_cache_dtype: auto
      max_model_len: 128
      vllm_metrics_logger_interval: 1.0
      env_vars:
        {{DYN_NAMESPACE: mine, ETCD_NAME: node7, NATS_SERVER: "nats://elsewhere", HF_TOKEN: "${{oc.env:NO_SUCH}}"}}
    vllm_kwargs:
      override_generation_config: {{top_p: 0.8}}
    colocated:
      enabled: false
      resources: {{gpus_per_node: 2, num_nodes: 1}}
loss_fn:
  use_importance_sampling_correction: false
  truncated_importance_sampling_type: tis
  truncated_importance_sampling_ratio: 2.0
grpo: {{num_prompts_per_step: 3, max_num_step: 2}}
cluster: {{gpus_per_node: 2}}
data: {{dataset_name: {data}}}
"""
G = "policy.generation"
EXPECTED = {
    "policy.model_name": "architecture MixtralForCausalLM was never trained and proved",
    "policy.optimizer.momentun": "unknown key",
    f"{G}.temperature": "from 0.01 to 2",
    f"{G}.top_p": "above 0",
    f"{G}.top_k": "from 1",
    f"{G}.dynamo_cfg.frontend_args.router_mode": "'kv'",
    f"{G}.dynamo_cfg.worker_args.extra_cli_args": "grpo.seed",
    f"{G}.vllm_cfg.tensor_parallel_size": "3 attention heads do not divide among 2",
    f"{G}.vllm_cfg.precision": "bfloat16 only",
    f"{G}.vllm_cfg.vllm_metrics_logger_interval": "says otherwise",
    f"{G}.vllm_cfg.env_vars.DYN_NAMESPACE": "DYN_*",
    f"{G}.vllm_cfg.env_vars.ETCD_NAME": "ETCD_*",
    f"{G}.vllm_cfg.env_vars.NATS_SERVER": "NATS_*",
    f"{G}.vllm_cfg.env_vars.HF_TOKEN": "NO_SUCH",
    f"{G}.vllm_kwargs.override_generation_config": "nothing else sets top-p",
    "loss_fn.truncated_importance_sampling_ratio": "has no effect",
    "loss_fn.truncated_importance_sampling_type": "has no effect",
    "grpo.max_num_step": "max_num_steps",
    "cluster.gpus_per_node": "need 3",
    "data.dataset_name": "not JSON",
}


@pytest.fixture
def faulty(tmp_path):
    """A recipe with the guide's keys and a fault of each kind."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"architectures": ["MixtralForCausalLM"], "num_attention_heads": 3}'
    )
    (tmp_path / "bad.jsonl").write_text("not json\n")
    path = tmp_path / "faulty.yaml"
    path.write_text(FAULTY.format(model=tmp_path / "model", data=tmp_path / "bad.jsonl"))
    return path


def config(*words):
    command = [sys.executable, "-m", "functional.suite.cli", "config", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_functional_config_names_all_of_them_in_one_line(faulty):
    done = config(faulty)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    for key, message in EXPECTED.items():
        assert f"{key}" in done.stderr, key
        assert message in done.stderr


def test_functional_config_names_all_of_them_for_programs(faulty):
    done = config(faulty, "--json")
    assert done.returncode == 1
    found = {problem["key"]: problem["message"] for problem in json.loads(done.stdout)["problems"]}
    assert found.keys() == EXPECTED.keys()
    for key, message in EXPECTED.items():
        assert message in found[key]


def test_a_rule_that_needs_a_key_at_fault_says_nothing(load):
    """Neither its default nor anything else stands in for it: eight engines may fit there or not, nobody knows."""
    eight = "G.colocated.resources.gpus_per_node=8"
    with pytest.raises(RecipeError) as caught:
        load(eight, "cluster.gpus_per_node=many", "grpo.seed=x")
    assert [problem.key for problem in caught.value.problems] == ["grpo.seed", "cluster.gpus_per_node"]
    with pytest.raises(RecipeError, match="need 9"):
        load(eight, "grpo.seed=x")


@pytest.mark.parametrize(
    "override",
    [
        "policy=7",
        "policy.generation=null",
        "policy.optimizer=sgd",
        "policy.optimizer.lr=null",
        "policy.model_name=null",
        "policy.generation.vllm_cfg=7",
        "policy.generation.dynamo_cfg.worker_args=7",
        "policy.generation.vllm_cfg.env_vars=7",
        "policy.generation.vllm_cfg.env_vars={1: [2]}",
        "policy.generation.stop_strings=[a, [b], {c: d}]",
        "policy.generation.colocated.resources=3",
        "grpo={1: 2, max_num_steps: x}",
        "loss_fn=none",
        "cluster.device=tpu",
        "policy.generation.vllm_kwargs.max_num_seqs=${nothing}",
        "policy.optimizer.lr=${nothing.at.all}",
        "policy.generation.stop_strings=['${nothing}']",
    ],
)
def test_any_key_at_fault_leaves_the_others_judged(load, override):
    with pytest.raises(RecipeError) as caught:
        load(override, "data.dataset_name=nowhere.jsonl")
    keys = [problem.key for problem in caught.value.problems]
    assert keys[-1] == "data.dataset_name"
    assert len(keys) == len(set(keys)) >= 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("loss_fn.truncated_importance_sampling_ratio=0", "loss_fn.truncated_importance_sampling_type=ice"),
        ("G.vllm_cfg=7", "G.vllm_kwargs.dtype=half"),
        ("G.vllm_kwargs=7", "G.vllm_cfg.is_mx=true"),
        ("G.vllm_kwargs=7", "G.dynamo_cfg.worker_args.extra_cli_args=[--no-such]"),
        ("G.dynamo_cfg.worker_args.enable_structural_tag=7", "G.dynamo_cfg.worker_args.extra_cli_args=[--seed=3]"),
        ("cluster=[]", "grpo=[]", "policy.generation.vllm_cfg=[1]", "loss_fn=[]"),
        ("policy=7", "grpo=null"),
        ("policy.optimizer=sgd", "grpo.seed=x"),
        ("policy.optimizer=${nothing}", "grpo.seed=x"),
        ("policy.model_name=???", "cluster=???", "G.vllm_kwargs.max_num_batched_tokens=???", "G.stop_strings=???"),
    ],
)
def test_each_key_at_fault_is_named_once_and_none_hides_another(load, overrides):
    with pytest.raises(RecipeError) as caught:
        load(*overrides)
    named = sorted(problem.key for problem in caught.value.problems)
    assert named == sorted(full(override.partition("=")[0]) for override in overrides)


@pytest.mark.parametrize(
    "key",
    [
        "G.temperature",
        "G.max_new_tokens",
        "G.vllm_cfg.tensor_parallel_size",
        "G.vllm_cfg.vllm_metrics_logger_interval",
        "G.vllm_kwargs.block_size",
        "grpo.seed",
        "policy.micro_batch_size",
        "policy.optimizer.lr",
    ],
)
@pytest.mark.parametrize("truth", ["true", "false"])
def test_a_truth_is_no_number(load, key, truth):
    with pytest.raises(RecipeError) as caught:
        load(f"{key}={truth}")
    assert [problem.key for problem in caught.value.problems] == [full(key)]


@pytest.mark.parametrize(
    "defaults", ["5", "true", "[5]", "[null]", "{a: b}", "[{a: b}]", "''", "${nothing}", "['${nothing}']"]
)
def test_parents_that_are_no_names_are_one_line(recipe_path, defaults):
    recipe_path.write_text(f"defaults: {defaults}\n{recipe_path.read_text()}")
    with pytest.raises(ConfigError, match="defaults") as caught:
        load_recipe(recipe_path)
    assert "\n" not in str(caught.value)


def test_parents_are_merged_key_by_key_and_lists_replaced(tmp_path, recipe_path):
    (tmp_path / "one.yaml").write_text(f"defaults: {recipe_path.name}\ngrpo: {{seed: 1, max_num_steps: 7}}\n")
    (tmp_path / "two.yaml").write_text("grpo: {seed: 2}\npolicy: {generation: {stop_token_ids: [1, 2]}}\n")
    (tmp_path / "own.yaml").write_text(
        "defaults: [one.yaml, two.yaml]\npolicy: {generation: {stop_token_ids: [3], max_new_tokens: '${grpo.seed}'}}\n"
    )
    recipe = load_recipe(tmp_path / "own.yaml", ["grpo.seed=5"])
    assert (recipe.grpo.seed, recipe.grpo.max_num_steps) == (5, 7)
    assert recipe.policy.generation.stop_token_ids == [3]
    assert recipe.policy.generation.max_new_tokens == 5
    assert recipe.policy.generation.vllm_cfg.max_model_len == 128


def test_reading_a_faulty_recipe_leaves_no_trace_in_the_next(load):
    with pytest.raises(RecipeError):
        load("G.vllm_cfg.max_model_len=many", "G.dynamo_cfg.worker_args=7", "loss_fn=none", "cluster.device=tpu")
    sound = load()
    assert sound.cluster.device == "cpu"
    assert sound.loss_fn.truncated_importance_sampling_ratio == 2.0
    assert sound.policy.generation.dynamo_cfg.worker_args.extra_cli_args == []
    assert Recipe.model_validate(sound.model_dump()) == sound


@pytest.mark.parametrize("override", ["grpo.max_num_steps", "a=[b", "a={b: c: d}", "a=${b", "policy.optimizer=[1]"])
def test_an_override_that_cannot_be_read_is_one_line(recipe_path, override):
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_path, [override])
    assert override.partition("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


JUNK = [None, 7, -1, "x", "", [], [1], ["a", None, {}], {}, {"a": 1}, {1: 2}, True, math.nan, math.inf]
JUNK += ["${nothing}", "${oc.env:NO_SUCH}", {"a": "${nothing}"}, ["${nothing}"]]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_stands_in_a_recipe_is_taken_or_refused_in_one_line(tmp_path, load, seed):
    dice, path = random.Random(seed), tmp_path / "junk.yaml"
    for _ in range(25):
        recipe = load().model_dump()
        keys = list(keys_of(recipe))
        for section, key in dice.sample(keys, dice.choice((1, 2, 3, 6))):
            section[key] = dice.choice(JUNK)
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(recipe)))
        assert "\n" not in refusal(path)


def full(key):
    return key.replace("G.", "policy.generation.", 1) if key.startswith("G.") else key


def refusal(path):
    """The error of a recipe that is refused; nothing for one that is taken."""
    try:
        load_recipe(path)
    except ConfigError as error:
        return str(error)
    return ""


def keys_of(section):
    """Every key of a recipe, with the mapping it stands in."""
    for key, value in section.items():
        yield section, key
        if isinstance(value, dict):
            yield from keys_of(value)

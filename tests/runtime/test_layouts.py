"""Which layouts of an engine a model's configuration allows."""

import json

import pytest

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.architectures import Layout, find_layout_problems, find_model_problem, read_config

DENSE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 134,
    "num_hidden_layers": 4,
}
MOE = DENSE | {"intermediate_size": 97, "num_experts": 4, "moe_intermediate_size": 6}


@pytest.mark.parametrize(
    ("config", "layout", "device", "found"),
    [
        (DENSE, (1, 1, 1), "cpu", {}),
        (DENSE, (4, 4, 1), "cpu", {}),
        (DENSE, (3, 1, 1), "cpu", {"tensor_parallel_size": "8 attention heads do not divide among 3"}),
        (DENSE | {"num_key_value_heads": 3}, (2, 1, 1), "cpu", {"tensor_parallel_size": "3 KV heads"}),
        (DENSE | {"num_key_value_heads": 16}, (8, 1, 1), "cpu", {}),
        (DENSE | {"intermediate_size": 98}, (4, 1, 1), "cpu", {"tensor_parallel_size": "intermediate_size, 98"}),
        (DENSE, (1, 5, 1), "cpu", {"pipeline_parallel_size": "4 layers only"}),
        (DENSE, (2, 1, 2), "cuda", {"expert_parallel_size": "no experts"}),
        (MOE, (2, 1, 1), "cuda", {}),
        (MOE, (4, 1, 1), "cuda", {"tensor_parallel_size": "moe_intermediate_size, 6"}),
        (MOE, (4, 1, 4), "cuda", {}),
        (DENSE | {"num_local_experts": 4, "moe_intermediate_size": 6}, (4, 1, 4), "cuda", {}),
        (MOE, (2, 1, 2), "cpu", {"expert_parallel_size": "on a CPU"}),
        ({}, (3, 7, 3), "cpu", {}),
        ({"num_attention_heads": "many", "vocab_size": True}, (3, 1, 1), "cpu", {}),
    ],
)
def test_what_does_not_divide_is_named(config, layout, device, found):
    problems = dict(find_layout_problems(config, Layout(*layout), device))
    assert problems.keys() == found.keys()
    assert all(found[key] in message for key, message in problems.items())


def test_padded_vocabularies_divide():
    three = DENSE | {"num_attention_heads": 9, "num_key_value_heads": 3}
    assert "padded to 192" not in str(list(find_layout_problems(three, Layout(3, 1, 1), "cpu")))
    assert "padded to 128" in str(list(find_layout_problems(three | {"vocab_size": 128}, Layout(3, 1, 1), "cpu")))


def test_a_recipe_is_judged_by_its_model_s_folder(load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"architectures": ["LlamaForCausalLM"]}))
    model = f"policy.model_name={tmp_path}"
    load(model, "G.vllm_cfg.tensor_parallel_size=2", "G.vllm_cfg.pipeline_parallel_size=2")
    with pytest.raises(ConfigError, match=r"vllm_cfg\.expert_parallel_size=2: the model has no experts"):
        load(model, "G.vllm_cfg.tensor_parallel_size=2", "G.vllm_cfg.expert_parallel_size=2")


def test_a_qwen2_whose_heads_the_engine_takes_otherwise_is_refused(tmp_path):
    config = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "ignores its head_dim, 32" in (find_model_problem(tmp_path / "config.json") or "")
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    assert find_model_problem(tmp_path / "config.json") is None


def test_of_a_config_that_is_no_object_nothing_is_read(tmp_path):
    for text in ("[]", "not json", "7"):
        (tmp_path / "config.json").write_text(text)
        assert read_config(tmp_path / "config.json") == {}
    assert read_config(tmp_path / "none.json") == {}

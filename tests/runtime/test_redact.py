"""Secrets in recipes are replaced wherever they are printed or stored."""

import json

import pytest

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.engine_flags import ENGINE_FLAGS, FRONTEND_FLAGS, WORKER_FLAGS
from functional.runtime.recipe.load import RecipeError
from functional.runtime.recipe.redact import is_secret_name, redacted, scrub
from functional.runtime.recipe.rules import find_warnings

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "--api-key", "password", "db_passwd"],
)
def test_secret_names(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_new_tokens",
        "--max-num-batched-tokens",
        "tokenizer",
        "stop_token_ids",
        "token_level_loss",
        "token_mult_prob_error",
        "NCCL_DEBUG",
        "input_key",
        "output_key",
        "",
    ],
)
def test_plain_names(name):
    assert not is_secret_name(name)


def test_of_all_flags_one_takes_a_secret():
    flags = {*ENGINE_FLAGS, *WORKER_FLAGS, *FRONTEND_FLAGS}
    assert {flag for flag in flags if is_secret_name(flag)} == {"hf_token"}


def test_redacted_keeps_what_is_no_secret():
    plain = {"max_new_tokens": 8, "stop_token_ids": [1, 2], "env_vars": {"NCCL_DEBUG": "INFO"}, "dataset": "token_set"}
    assert redacted(plain) == plain


def test_redacted_replaces_values_words_and_urls():
    shown = redacted(
        {
            "env_vars": {"HF_TOKEN": SECRET, "TOKEN_FOR_HUB": SECRET, "A": "b"},
            "model_name": f"https://me:{SECRET}@hub.example/model",
            "extra_cli_args": ["--api-key", SECRET, f"--hf-token={SECRET}", "--seed", "1"],
            "deep": [{"password": SECRET}],
        }
    )
    assert SECRET not in json.dumps(shown)
    assert shown["env_vars"]["A"] == "b"
    assert shown["extra_cli_args"][-2:] == ["--seed", "1"]
    assert shown["model_name"] == "https://[redacted]@hub.example/model"


def test_scrub_takes_a_recipes_secrets_out_of_any_text():
    recipe = {"env_vars": {"HF_TOKEN": SECRET}, "words": [f"--hf-token={SECRET}x"], "name": "plain"}
    text = scrub(f"plain: cannot log in with {SECRET} nor {SECRET}x at http://u:p@host/", recipe)
    assert text == "plain: cannot log in with [redacted] nor [redacted] at http://[redacted]@host/"


def test_a_stored_recipe_holds_no_secret(load):
    recipe = load(f"G.vllm_cfg.env_vars.HF_TOKEN={SECRET}", "G.vllm_cfg.env_vars.PLAIN=kept")
    stored = json.dumps(recipe.shown())
    assert SECRET not in stored
    assert "kept" in stored
    assert recipe.policy.generation.vllm_cfg.env_vars["HF_TOKEN"] == SECRET
    assert SECRET not in recipe.scrub(f"worker died: {SECRET}")


@pytest.mark.parametrize(
    "override",
    [
        f"G.vllm_cfg.env_vars.DYN_API_TOKEN={SECRET}",
        f"G.vllm_cfg.env_vars=HF_TOKEN={SECRET}",
        f"G.vllm_cfg.env_vars=[HF_TOKEN={SECRET}]",
        f"G.vllm_kwargs.hf_token={SECRET}",
        f"G.dynamo_cfg.worker_args.extra_cli_args=[--hf-token,{SECRET}]",
        f"G.dynamo_cfg.worker_args.extra_cli_args=[--hf-token={SECRET}]",
        f"G.vllm_cfg.envvars.HF_TOKEN={SECRET} G.vllm_cfg=7",
        f"data.dataset_name=https://me:{SECRET}@host/d",
    ],
)
def test_errors_hold_no_secret(load, override):
    with pytest.raises(ConfigError) as caught:
        load(*override.split(" "))
    assert SECRET not in str(caught.value)
    assert isinstance(caught.value, RecipeError)
    assert all(SECRET not in problem.shown_value + problem.message for problem in caught.value.problems)


def test_warnings_hold_no_secret(load):
    warnings = find_warnings(load(f"G.vllm_cfg.hub_token={SECRET}"))
    assert len(warnings) == 1
    assert SECRET not in warnings[0]


def test_a_secret_can_come_from_the_environment(load, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", SECRET)
    recipe = load("G.vllm_cfg.env_vars.HF_TOKEN=${oc.env:MY_TOKEN}")
    assert recipe.policy.generation.vllm_cfg.env_vars["HF_TOKEN"] == SECRET
    assert SECRET not in json.dumps(recipe.shown())


def test_a_missing_variable_is_named(load):
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        load("G.vllm_cfg.env_vars.HF_TOKEN=${oc.env:NO_SUCH_VARIABLE}")

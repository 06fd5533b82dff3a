"""Data that a run could not use is refused by `functional config` and `functional run` alike, before anything."""

import json
import subprocess
import sys

import pytest

from functional.runtime.config import RecipeError
from functional.runtime.errors import ConfigError
from functional.suite.data import describe_data
from functional.suite.models import ARITHMETIC_DIR, RANDOM, find_tokenizer
from functional.suite.preflight import load_for_run

TOKENIZER = find_tokenizer("builtin:arithmetic")


@pytest.fixture
def data(tmp_path):
    """A file of eight questions; the third has 128 tokens, as many as the recipe's context."""
    path = tmp_path / "q.jsonl"
    prompts = [f"{i}+1=" for i in range(8)]
    prompts[2] = "1+" * 63 + "1="
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    return path


def functional(*words):
    command = [sys.executable, "-m", "functional.suite.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("model", ["builtin:arithmetic", ARITHMETIC_DIR])
def test_a_prompt_that_fills_the_context_is_refused_with_file_and_line(recipe_path, data, tmp_path, model):
    words = (recipe_path, f"policy.model_name={model}", f"data.dataset_name={data}")
    out = tmp_path / "out"
    for done in (functional("config", *words), functional("run", *words, "--out", out)):
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert f"{data}:3: the prompt has 128 tokens" in done.stderr
        assert "max_model_len=128" in done.stderr
    assert not out.exists()


def test_one_token_less_fits_whatever_max_new_tokens_says(recipe_path, data):
    data.write_text(data.read_text().replace("1+1+1=", "1+1=1"))
    words = (f"data.dataset_name={data}", "policy.generation.max_new_tokens=4096")
    context = "policy.generation.vllm_cfg.max_model_len=129"
    done = functional("config", recipe_path, *words, context, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["longest_prompt"] == 127


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (("grpo.num_prompts_per_step=9",), ("holds 8 questions only", "128 tokens")),
        (("grpo.num_prompts_per_step=x",), ("valid integer", "128 tokens")),
        (
            ("policy.generation.vllm_cfg.max_model_len=x", "grpo.num_prompts_per_step=9"),
            ("valid integer", "8 questions"),
        ),
        (("policy.model_name=/nowhere", "grpo.num_prompts_per_step=9"), ("no such folder", "8 questions")),
        (("policy.model_name=[a]", "grpo.num_prompts_per_step=9"), ("valid string", "8 questions")),
    ],
)
def test_what_is_wrong_with_other_keys_does_not_hide_the_data_s_own(recipe_path, data, overrides, messages):
    with pytest.raises(RecipeError) as caught:
        load_for_run(recipe_path, [f"data.dataset_name={data}", *overrides])
    assert len(caught.value.problems) == len(messages)
    assert all(message in str(caught.value) for message in messages)


def test_a_folder_that_is_no_model_is_said_once(recipe_path, tmp_path, data):
    data.write_text("no JSON")
    with pytest.raises(RecipeError) as caught:
        load_for_run(recipe_path, [f"data.dataset_name={data}", f"policy.model_name={tmp_path}"])
    assert [problem.key for problem in caught.value.problems] == ["policy.model_name", "data.dataset_name"]


def test_json_of_a_refused_prompt(recipe_path, data):
    done = functional("config", recipe_path, f"data.dataset_name={data}", "--json")
    assert done.returncode == 2
    assert f"{data}:3: " in json.loads(done.stdout)["error"]


def test_built_in_data_is_measured_too():
    assert describe_data("arithmetic", 8, TOKENIZER, 128).longest_prompt == 4
    with pytest.raises(ConfigError, match=r"arithmetic: the prompt has 4 tokens.*max_model_len=4 \(and 154 more"):
        describe_data("arithmetic", 8, TOKENIZER, 4)
    longest = describe_data("token_set", 8, find_tokenizer(RANDOM), 512).longest_prompt
    assert longest is not None
    with pytest.raises(ConfigError, match="token_set: the prompt has"):
        describe_data("token_set", 8, find_tokenizer(RANDOM), longest)


def test_without_a_tokenizer_prompts_are_not_measured(data):
    assert describe_data(str(data), 8).longest_prompt is None

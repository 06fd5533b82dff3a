"""Data that a run could not use is refused by `functional config` and `functional run` alike, before anything."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.load import RecipeError
from functional.suite import preflight
from functional.suite.data import describe_data
from functional.suite.models import ARITHMETIC_DIR, RANDOM, find_tokenizer
from functional.suite.preflight import prepare
from functional.suite.show_config import describe

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32
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
    for status, done in ((1, functional("config", *words)), (2, functional("run", *words, "--out", out))):
        assert (done.returncode, done.stdout) == (status, "")
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
        prepare(recipe_path, [f"data.dataset_name={data}", *overrides])
    assert len(caught.value.problems) == len(messages)
    assert all(message in str(caught.value) for message in messages)


def test_a_folder_that_is_no_model_is_said_once(recipe_path, tmp_path, data):
    data.write_text("no JSON")
    with pytest.raises(RecipeError) as caught:
        prepare(recipe_path, [f"data.dataset_name={data}", f"policy.model_name={tmp_path}"])
    assert [problem.key for problem in caught.value.problems] == ["policy.model_name", "data.dataset_name"]


@pytest.mark.parametrize(
    ("rope", "overrides", "is_refused"),
    [
        ({"rope_type": "default"}, (), True),
        (LLAMA3, (), True),
        (None, (), True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, (), False),
        (None, ("policy.generation.vllm_cfg.max_model_len=64",), False),
        (None, ("policy.generation.vllm_cfg.env_vars.VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",), False),
    ],
)
def test_a_context_longer_than_the_model_s_is_refused_before_a_run(recipe_path, tmp_path, rope, overrides, is_refused):
    model = tmp_path / "model"
    shutil.copytree(ARITHMETIC_DIR, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64, "rope_parameters": rope}))
    words = [f"policy.model_name={model}", *overrides]
    if not is_refused:
        prepare(recipe_path, words)
        return
    with pytest.raises(RecipeError, match="max_model_len=128: the model takes 64 positions") as caught:
        prepare(recipe_path, words)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("overrides", "has_header", "is_refused"),
    [
        (("enforce_eager=false",), False, True),
        (("enforce_eager=false",), True, False),
        (("enforce_eager=true",), False, False),
    ],
)
def test_compiling_needs_what_compilers_need(recipe_path, tmp_path, monkeypatch, overrides, has_header, is_refused):
    if has_header:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)
    words = [f"policy.generation.vllm_cfg.{word}" for word in overrides]
    if is_refused:
        with pytest.raises(ConfigError, match=r"enforce_eager=False: .*Python.h is not here: set it to true"):
            prepare(recipe_path, words)
    else:
        prepare(recipe_path, words)


def test_the_built_in_model_s_context_is_known(recipe_path):
    with pytest.raises(RecipeError, match="the model takes 4096 positions"):
        prepare(recipe_path, ["policy.generation.vllm_cfg.max_model_len=4097"])
    prepare(recipe_path, ["policy.generation.vllm_cfg.max_model_len=4096"])


def test_json_of_a_refused_prompt(recipe_path, data):
    done = functional("config", recipe_path, f"data.dataset_name={data}", "--json")
    assert done.returncode == 1
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


def test_tokenizer_and_data_are_read_once(recipe_path, data, monkeypatch):
    data.write_text(data.read_text().replace("1+1+1=", "1+1=1"))
    read = []
    for name in ("find_tokenizer", "read_data"):
        kept = getattr(preflight, name)
        monkeypatch.setattr(preflight, name, lambda *given, kept=kept, name=name: read.append(name) or kept(*given))
    prepared = prepare(recipe_path, [f"data.dataset_name={data}"])
    assert describe(prepared, ask_engine=False)["data"] == asdict(prepared.data)
    assert prepared.data.longest_prompt == 127
    assert read == ["find_tokenizer", "read_data"]

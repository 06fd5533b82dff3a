"""`functional config`: its answer for people and for programs, and the data it names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from functional.runtime.errors import ConfigError
from functional.suite.data import describe_data

RECIPES = sorted(Path(__file__).parents[2].glob("functional/recipes/*.yaml"))


def config(*words):
    done = subprocess.run(
        [sys.executable, "-m", "functional.suite.cli", "config", *map(str, words)], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_kits_own_recipes_are_valid(path):
    status, out, err = config(path, "--json")
    assert status == 0, err
    assert json.loads(out)["warnings"] == []


def test_json_of_a_valid_recipe(recipe_path):
    token = "policy.generation.vllm_cfg.env_vars.HF_TOKEN=hunter2hunter2"
    status, out, err = config(recipe_path, token, "policy.generation.vllm_kwargs.max_num_seq=3", "--json")
    assert (status, err) == (0, "")
    assert "hunter2" not in out
    shown = json.loads(out)
    assert shown["valid"] is True
    assert shown["warnings"] == [
        "policy.generation.vllm_kwargs.max_num_seq=3: unknown and ignored, the nearest known key is max_num_seqs"
    ]
    kinds = {option["path"].rpartition(".")[2]: option["kind"] for option in shown["options"]}
    assert (kinds["precision"], kinds["max_num_seq"]) == ("translated", "unknown")
    assert shown["worker_argv"][0] == "--enable-rl"
    assert len(shown["data"]["sha256"]) == 64
    assert shown["recipe"]["policy"]["generation"]["vllm_cfg"]["max_model_len"] == 128


def test_json_of_a_refused_recipe(recipe_path):
    status, out, err = config(recipe_path, "policy.generation.vllm_cfg.precision=fp8", "--json")
    assert (status, err) == (1, "")
    assert json.loads(out)["problems"] == [
        {
            "key": "policy.generation.vllm_cfg.precision",
            "value": "'fp8'",
            "message": "generation runs in bfloat16 only",
        }
    ]


def test_text_names_class_and_flag(recipe_path):
    status, out, err = config(recipe_path, "policy.generation.vllm_cfg.skip_tokenizer_init=true")
    assert status == 0
    assert "translated" in out
    assert "--dtype bfloat16" in out
    assert err.startswith("warning: policy.generation.vllm_cfg.skip_tokenizer_init=True: unsupported and ignored")


def test_a_refused_recipe_is_one_line(recipe_path):
    status, out, err = config(recipe_path, "policy.generation.colocated.enabled=true")
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_built_in_data_has_a_hash():
    record = describe_data("arithmetic", 8)
    assert (record.questions, record.source) == (155, "built in")
    assert record == describe_data("arithmetic", 8)


def test_a_files_hash_is_of_its_bytes(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    digest = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
    assert describe_data(str(path), 1).sha256 == digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json\n", r"d\.jsonl:1: not JSON"),
        ('{"prompt": 1, "answer": "2"}\n', r"d\.jsonl:1: the prompt must be a string"),
        ("\n", "no questions"),
        ('{"prompt": "1+1=", "answer": "2"}\n', r"num_prompts_per_step=8: .* holds 1 questions only"),
    ],
)
def test_bad_data(tmp_path, text, message):
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        describe_data(str(path), 8)

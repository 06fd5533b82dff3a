"""The command line: bad input ends in one line and status 2."""

import subprocess
import sys

import pytest


def functional(*words, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "functional.suite.cli", *words], capture_output=True, text=True, cwd=cwd, timeout=120
    )


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("policy: {model_name: builtin:arithmetic, optimizer: {lr: 0.1}, generation: {}}\n")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "a recipe is a mapping"),
        ("a: [1", "not a YAML recipe"),
        ("policy: {}\n", "policy.model_name: Field required"),
        ("defaults: recipe.yaml\n", "leads back to itself"),
    ],
)
def test_garbage_in_a_recipe(recipe, text, message):
    recipe.write_text(text)
    done = functional("run", str(recipe), "--out", str(recipe.parent / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (recipe.parent / "out").exists()


def test_a_missing_recipe(tmp_path):
    done = functional("run", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert "no such recipe" in done.stderr


def test_an_override_without_a_value(recipe):
    done = functional("config", str(recipe), "grpo.max_num_steps")
    assert done.returncode == 2
    assert "expected key=value" in done.stderr


def test_serve_chat_listens_nowhere_but_where_it_is_told(recipe):
    done = functional("serve-chat", str(recipe), "--host", "0.0.0.0", "--out", str(recipe.parent / "out"))
    assert done.returncode == 2
    assert "chat_host='0.0.0.0': would listen everywhere: name one address" in done.stderr
    assert not (recipe.parent / "out").exists()


def test_config_shows_what_a_recipe_resolves_to(recipe):
    done = functional("config", str(recipe), "grpo.max_num_steps=5")
    assert done.returncode == 0
    assert "max_num_steps: 5" in done.stdout


def test_an_environment_without_dynamo_says_so(recipe, monkeypatch):
    monkeypatch.setenv("DYNAMO_VENV", str(recipe.parent))
    done = functional("run", str(recipe), "--out", str(recipe.parent / "out"))
    assert done.returncode == 2
    assert "this environment has no Dynamo runtime" in done.stderr

"""Fixtures of recipes, for the tests of `functional`: a conftest takes the names that its folder uses."""

import os
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "functional" / "recipes"
"""The kit's own recipes."""

RECIPE = """
policy:
  model_name: builtin:arithmetic
  optimizer: {lr: 0.1}
  generation:
    vllm_cfg: {max_model_len: 128}
    colocated: {resources: {gpus_per_node: 4}}
cluster: {gpus_per_node: 8}
"""


@pytest.fixture
def recipe_path(tmp_path):
    """A recipe with four generation devices on one node."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def load(recipe_path):
    """The recipe with overrides, `G` at a key's start standing for policy.generation."""
    from functional.runtime.recipe.load import load_recipe

    def loaded(*overrides):
        return load_recipe(recipe_path, [expand(override) for override in overrides])

    return loaded


@pytest.fixture
def read(recipe_path):
    """As `load`, without the rules: for what a rule refuses today and the command line has words for."""
    from functional.runtime.recipe.load import load_recipe

    return lambda *overrides: load_recipe(recipe_path, [expand(override) for override in overrides], rules=())


def expand(key):
    return "policy.generation" + key[1:] if key.startswith("G.") else key


@pytest.fixture(scope="session")
def dynamo_python():
    """Python of Dynamo's environment."""
    python = Path(os.environ.get("DYNAMO_VENV", "/opt/dynamo_venv")) / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no Dynamo environment at {python}")
    return python

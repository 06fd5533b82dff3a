"""Engines' seeds: the same for the same recipe, and never the same for two engines."""

import pytest

from functional.runtime.recipe.seeds import MOST_ENGINES, engine_seed


def test_the_same_recipe_gives_the_same_seeds():
    """Values to keep: a change of them changes every run of every recipe."""
    assert [engine_seed(42, slot, launch) for slot, launch in ((0, 0), (1, 0), (0, 1))] == [
        397185506,
        502199085,
        461568857,
    ]


@pytest.mark.parametrize("recipe_seed", [0, 1, 42, -1, 2**63])
def test_no_two_engines_share_a_seed(recipe_seed):
    seeds = {engine_seed(recipe_seed, slot, launch) for slot in range(512) for launch in range(64)}
    assert len(seeds) == 512 * 64
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_other_recipes_have_other_seeds():
    assert len({engine_seed(recipe_seed, 0, 0) for recipe_seed in range(1000)}) == 1000


@pytest.mark.parametrize("engine", [(-1, 0), (0, -1), (MOST_ENGINES, 0), (0, MOST_ENGINES)])
def test_engines_beyond_the_range_are_refused(engine):
    with pytest.raises(ValueError, match="no seed"):
        engine_seed(42, *engine)

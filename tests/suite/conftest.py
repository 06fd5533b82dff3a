"""Recipes to test with."""

from tests.recipes import load, recipe_path

__all__ = ["load", "recipe_path"]

"""Recipes to test with."""

from tests.recipes import dynamo_python, load, read, recipe_path

__all__ = ["dynamo_python", "load", "read", "recipe_path"]

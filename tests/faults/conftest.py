"""Fixtures shared with other folders."""

from tests.recipes import dynamo_python

__all__ = ["dynamo_python"]

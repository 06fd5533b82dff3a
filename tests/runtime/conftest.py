"""Tests of functional.runtime and functional.suite; they need the trainer's environment."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]

"""These tests run in the trainer's environment; the kit's own has neither torch nor transformers."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

"""Real runs that are hurt on purpose; they need the image (or environments like its own)."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]

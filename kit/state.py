"""Where the repository is, and the project's own state."""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def state_dir() -> Path:
    """The project's own state: services, caches, unpacked tools. `KIT_STATE` moves it."""
    return Path(os.environ.get("KIT_STATE") or REPO / ".state").absolute()

"""Questions about paths that a recipe names, which may be of any length and hold any character."""

import os
from contextlib import suppress
from pathlib import Path


def is_folder(name: str) -> bool:
    """As Path.is_dir; False for what is no path at all (too long, NUL in it)."""
    with suppress(OSError, ValueError):
        return Path(name).is_dir()
    return False


def find_file_problem(name: str) -> str | None:
    """Why `name` is no file that can be read; None when it is one."""
    path = Path(name)
    with suppress(OSError, ValueError):
        if path.is_file():
            return None if os.access(path, os.R_OK) else "may not be read"
        if path.exists():
            return "is a folder" if path.is_dir() else "is no plain file"
    return "no such file" if path.is_absolute() else f"no such file (looked in {Path.cwd()})"

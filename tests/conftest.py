"""For all tests: where each folder's tests run, and handlers for signals that a background job ignores."""

import importlib.util
import signal
from pathlib import Path

PLACES = {
    "kit": "host",
    "slurm": "host",
    "sqsh": "host",
    "functional": "host",
    "runtime": "trainer",
    "suite": "trainer",
    "faults": "trainer",
    "engine": "dynamo",
}
"""Folder → whose Python runs it: the host's (.venv), or in the image the trainer's or Dynamo's. The rest follows:
`pytest` collects what belongs to the Python that it runs with."""

MARKS = {"dynamo": "vllm", "trainer": "ray"}
"""Place → a package by which its Python is known; the first that is there counts."""


def place() -> str:
    """Where this is."""
    return next((name for name, package in MARKS.items() if importlib.util.find_spec(package)), "host")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    parts = collection_path.relative_to(Path(__file__).parent).parts
    return True if parts and PLACES.get(parts[0], place()) != place() else None


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

"""Waiting for the trainer, while the fleet is watched."""

import re
from typing import Any

from functional.runtime.errors import RunError
from functional.runtime.fleet.fleet import Fleet

WATCH_INTERVAL_S = 0.5
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def watched(fleet: Fleet, reference: Any) -> Any:
    """The value of a Ray reference, unless a process that nothing replaces dies first: then ProcessDiedError."""
    import ray
    from ray.exceptions import RayError

    while not ray.wait([reference], timeout=WATCH_INTERVAL_S)[0]:
        fleet.check_control_plane()
    try:
        return ray.get(reference)
    except RayError as error:
        fleet.check_control_plane()  # another process that is gone is the first cause
        cause = getattr(error, "cause", None) or error
        raise RunError(f"trainer: {type(cause).__name__}: {ends_of(str(cause))}") from error


def ends_of(text: str) -> str:
    """A long message on one line: its beginning, and its end, where Ray puts the first cause."""
    plain = " ".join(COLOURS.sub("", text).split())
    return plain if len(plain) <= 400 else f"{plain[:120]} … {plain[-280:]}"

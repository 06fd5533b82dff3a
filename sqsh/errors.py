"""Errors with a known cause."""

from __future__ import annotations


class SqshError(Exception):
    """A conversion that cannot be done: `what` and where, and a `hint` what to do; one line together."""

    status = 1

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.what}: {self.hint}" if self.hint else self.what
        return " ".join(text.split())


class UsageError(SqshError):
    """The request is invalid; nothing was started."""

    status = 2


class BadImage(SqshError):  # noqa: N818
    """The image is damaged, does not match its digest, or contains what is not allowed."""

"""What the converter raises when it knows what went wrong."""

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
    """What was asked for makes no sense; nothing was started."""

    status = 2


class BadImage(SqshError):  # noqa: N818
    """The image is damaged, is not what its digest says, or tries what no image may."""

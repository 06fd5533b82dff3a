"""Errors with a known cause; each ends a command with one line and an exit status."""

from __future__ import annotations

CHECK_FAILED = 1
BAD_USAGE = 2


class KitError(Exception):
    """An operation failed; ends the command with exit status `status`.

    `what` says what failed and where, `hint` what to do about it. Both end up on one line.
    """

    status = CHECK_FAILED

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.what}: {self.hint}" if self.hint else self.what
        return " ".join(text.split())


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP: unwinds the stack, so that every clean-up runs.

    Not a KeyboardInterrupt, which typer would turn into an exit status of its own without a message.
    """


class UsageError(KitError):
    """The command line or an input file is wrong; nothing was started."""

    status = BAD_USAGE

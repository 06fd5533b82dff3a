"""What the kit raises when it knows what went wrong."""

from __future__ import annotations

CHECK_FAILED = 1
BAD_USAGE = 2


class KitError(Exception):
    """A thing that was asked for could not be done; ends the command with `status`.

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
    """Ctrl-C, SIGTERM or SIGHUP: unwinds everything, so that nothing stays behind.

    Not a KeyboardInterrupt, which typer would turn into an exit status of its own without a word.
    """


class UsageError(KitError):
    """The command line or an input file is wrong; nothing was started."""

    status = BAD_USAGE

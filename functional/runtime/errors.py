"""Errors that end in one line for the user."""


class RunError(Exception):
    """A run cannot go on; the message says what, where and what to do."""


class InterruptedRunError(RunError):
    """The run was told to stop."""


class ConfigError(RunError):
    """A recipe is wrong; the message names the key path and the value."""


class ProcessDiedError(RunError):
    """A managed process ended while it was needed; the message carries its last log lines."""


class RefitError(RunError):
    """A policy update did not reach every worker; admission stays shut."""


class RolloutError(RunError):
    """A completion could not be had, or may not be sent; the message says why."""


class AdmissionShutError(RolloutError):
    """Admission is shut: an update is under way, or has failed."""


class UnansweredError(RolloutError):
    """The frontend did not answer as asked. status: the HTTP status that it last answered, None where none came;
    is_late: time ran out while it was waited for."""

    def __init__(self, text: str, status: int | None = None, is_late: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.is_late = is_late

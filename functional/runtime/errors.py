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

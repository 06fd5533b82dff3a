"""Errors that end in one line for the user."""


class RuntimeFault(Exception):
    """A run cannot go on; the message says what, where and what to do."""


class ConfigError(RuntimeFault):
    """A recipe is wrong; the message names the key path and the value."""


class ProcessDied(RuntimeFault):
    """A managed process ended while it was needed; the message carries its last log lines."""


class RefitError(RuntimeFault):
    """A policy update did not reach every worker; admission stays shut."""


class RolloutError(RuntimeFault):
    """A completion could not be had, or may not be sent; the message says why."""

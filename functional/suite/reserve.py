"""Disk space that is kept for the end of a run, so that one that ends for want of space can still report it."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from functional.runtime.errors import ConfigError

RESERVE_BYTES = 4 * 2**20
"""Report, pages and the last lines of logs: pages are bounded by 2 MB, whatever a run's length."""


class Reserve:
    """A file of RESERVE_BYTES in the run's folder from the beginning until the run comes to its end."""

    def __init__(self, out: Path) -> None:
        """Raises ConfigError where there is no room for it."""
        self._path = out / ".reserve"
        try:
            with self._path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            with suppress(OSError):
                self.give_back()
            if not is_full(error):
                raise
            room = f"no room for the {RESERVE_BYTES / 2**20:.0f} MiB that the report may take ({error.strerror})"
            raise ConfigError(f"{out}: {room}: free some, or name another --out") from error

    def give_back(self) -> None:
        """May be called again."""
        self._path.unlink(missing_ok=True)


def is_full(error: BaseException) -> bool:
    """Whether a write failed for want of space."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)

"""Copy stdin to stdout, line by line, with the values of secret variables replaced.

A variable is secret if its name says so. Short values are left: to replace every «1» would hide the log.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|AUTH|(API|ACCESS|SIGNING)_?KEY", re.IGNORECASE)
SHORTEST = 6
HIDDEN = "***"


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Values to hide, the longest first, and each line of one that has several."""
    found = [value for name, value in environment.items() if SECRET.search(name)]
    lines = {line.strip() for value in found for line in value.splitlines()}
    return sorted((line for line in lines if len(line) >= SHORTEST), key=len, reverse=True)


def main() -> None:
    hidden = secrets(os.environ)
    for line in sys.stdin:
        for value in hidden:
            line = line.replace(value, HIDDEN)
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()

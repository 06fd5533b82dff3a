"""Ports for a run: fixed ranges below the ephemeral floor (32768), tested free on the address they will serve."""

import os
import socket
from pathlib import Path

FIRST, LAST = 20000, 29999


class PortRange:
    """Hands out free TCP ports, each once; starts at a place that depends on the process, so runs do not collide."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self._next = FIRST + (os.getpid() * 37) % (LAST - FIRST)
        self.given: list[int] = []

    def take(self, span: int = 1) -> int:
        """Return the first of `span` consecutive free ports. Raises OSError when the whole range is taken."""
        for _ in range(FIRST, LAST):
            start = self._next
            self._next = FIRST if start + span >= LAST else start + span
            if start + span < LAST and all(self._is_free(start + offset) for offset in range(span)):
                self.given += range(start, start + span)
                return start
        raise OSError(f"no free port between {FIRST} and {LAST} on {self.address}")

    def _is_free(self, port: int) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.address, port))
            except OSError:
                return False
        return True


def is_listening(port: int) -> bool:
    """Whether some process of this machine listens on `port`, on any address."""
    wanted = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with Path(table).open(encoding="ascii") as rows:
                next(rows)
                if any(fields[1].endswith(wanted) and fields[3] == "0A" for fields in map(str.split, rows)):
                    return True
        except FileNotFoundError:
            continue
    return False

"""Ports for a run's servers: outside the ephemeral range, free, and reserved against other runs on the node."""

import os
import socket
import threading
from pathlib import Path

from functional.runtime.errors import RunError

PREFERRED = range(20000, 30000)
UNPRIVILEGED = 1024
SETTING = "net.ipv4.ip_local_port_range"


class PortRange:
    """Hands out TCP ports that are free on one address and on loopback, each once.

    Each is reserved by an abstract socket of its name, which is the network's own, whatever users and containers share
    it, and which ends with this process; so two runs never take one port between the test and its use.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        """Raises RunError where the ephemeral range leaves no port."""
        self.address = address
        self.given: list[int] = []
        self._window = server_ports(*ephemeral_range())
        self._next = self._window.start + (os.getpid() * 37) % len(self._window)
        self._reservations: list[socket.socket] = []
        self._lock = threading.Lock()

    def take(self, span: int = 1) -> int:
        """Return the first of `span` consecutive free ports. Raises RunError when all are taken."""
        first, last = self._window.start, self._window.stop
        with self._lock:
            for _ in self._window:
                start = self._next
                self._next = first if start + span >= last else start + span
                if start + span <= last and self._reserve(range(start, start + span)):
                    self.given += range(start, start + span)
                    return start
        raise RunError(f"no free port between {first} and {last - 1} on {self.address}: end what listens there")

    def _reserve(self, ports: range) -> bool:
        held: list[socket.socket] = []
        for port in ports:
            reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            held.append(reservation)
            try:
                reservation.bind(f"\0functional-port-{port}")
            except OSError:
                break
            if not self._is_free(port):
                break
        else:
            self._reservations += held
            return True
        for reservation in held:
            reservation.close()
        return False

    def _is_free(self, port: int) -> bool:
        return all(can_bind(address, port) for address in {self.address, "127.0.0.1"})


def can_bind(address: str, port: int = 0) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel gives to sockets that ask for none."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    return int(low), int(high)


def server_ports(low: int, high: int) -> range:
    """Ports for servers where `low` to `high` are ephemeral: the preferred ones, else the most that lie together.

    Raises RunError where none is left.
    """
    if PREFERRED.stop <= low or high < PREFERRED.start:
        return PREFERRED
    window = max(range(UNPRIVILEGED, low), range(high + 1, 65536), key=len)
    if not window:
        raise RunError(f"{SETTING} is {low} {high} on {socket.gethostname()}: no port is left for servers; narrow it")
    return window


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

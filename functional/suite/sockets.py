"""Which sockets a run listens on: address, port, and the process that owns each."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from functional.runtime.fleet.guard import descendants


@dataclass(frozen=True)
class ListeningSocket:
    """One TCP socket in state LISTEN. `program`: the first words of its owner's command line."""

    address: str
    port: int
    pid: int
    program: str

    @property
    def is_wildcard(self) -> bool:
        """Whether it answers on every interface."""
        return ipaddress.ip_address(self.address).is_unspecified


def listening_sockets() -> list[ListeningSocket]:
    """Every TCP socket that this process or one below it listens on, by port and address."""
    own = {os.getpid(), *descendants(os.getpid())}
    found = [
        ListeningSocket(socket.laddr.ip, socket.laddr.port, socket.pid, command_line(socket.pid, words=4)[:80])
        for socket in psutil.net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN and socket.pid in own
    ]
    return sorted(found, key=lambda s: (s.port, s.address))


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel gives to sockets that ask for none."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    return int(low), int(high)


def command_line(pid: int, words: int | None = None) -> str:
    """The process's command line, or its first `words` words; empty for one that has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline()[:words]).strip()
    except psutil.NoSuchProcess:
        return ""

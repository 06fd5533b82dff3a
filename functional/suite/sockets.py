"""Which sockets a run listens on: address, port, and the process that owns each."""

import ipaddress
import os
from contextlib import suppress
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
    """Every address and port on which this process or one below it listens; of several owners the youngest."""
    found: dict[tuple[int, str], ListeningSocket] = {}
    for pid in (os.getpid(), *descendants(os.getpid())):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    address, port = str(ipaddress.ip_address(connection.laddr.ip)), connection.laddr.port
                    program = " ".join(process.cmdline()[:4]).strip()[:80]
                    found[port, address] = ListeningSocket(address, port, pid, program)
    return [found[key] for key in sorted(found)]


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel gives to sockets that ask for none."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    return int(low), int(high)

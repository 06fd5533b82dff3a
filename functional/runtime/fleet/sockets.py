"""Which sockets a run listens on: address, port, and the process that owns each."""

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from functional.runtime.fleet.guard import descendants
from functional.runtime.fleet.ports import ephemeral_range


@dataclass(frozen=True)
class NodeSockets:
    """What some processes of one node listen on, and which ports its kernel gives to sockets that ask for none."""

    sockets: list["ListeningSocket"]
    ephemeral: tuple[int, int]

    @classmethod
    def here(cls, roots: Iterable[int] | None = None) -> "NodeSockets":
        return cls(listening_sockets(roots), ephemeral_range())

    def without(self, known: "NodeSockets") -> "NodeSockets":
        """Those that were not there when `known` was seen."""
        places = {(s.address, s.port) for s in known.sockets}
        return NodeSockets([s for s in self.sockets if (s.address, s.port) not in places], self.ephemeral)


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


def listening_sockets(roots: Iterable[int] | None = None) -> list[ListeningSocket]:
    """Every TCP socket that these processes (this one, if not given) or one below them listens on, by port and address.

    Only the processes of this machine are known here.
    """
    own = {pid for root in (roots or [os.getpid()]) for pid in (root, *descendants(root))}
    found = [
        ListeningSocket(socket.laddr.ip, socket.laddr.port, socket.pid, command_line(socket.pid, words=4)[:80])
        for socket in psutil.net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN and socket.pid in own
    ]
    return sorted(found, key=lambda s: (s.port, s.address))


def command_line(pid: int, words: int | None = None) -> str:
    """The process's command line, or its first `words` words; empty for one that has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline()[:words]).strip()
    except psutil.NoSuchProcess:
        return ""

"""Which sockets a run listens on: address, port, and the process that owns each, from /proc."""

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from functional.runtime.fleet.guard import descendants

LISTEN = "0A"


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
    """Every TCP socket that this process or one below it listens on."""
    owners = dict(_socket_inodes([os.getpid(), *descendants(os.getpid())]))
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTEN and (pid := owners.get(fields[9])) is not None:
                address, port = fields[1].split(":")
                found.append(ListeningSocket(_decode(address), int(port, 16), pid, _program(pid)))
    return sorted(found, key=lambda s: (s.port, s.address))


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel gives to sockets that ask for none."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    return int(low), int(high)


def _socket_inodes(pids: list[int]) -> Iterator[tuple[str, int]]:
    for pid in pids:
        try:
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                target = fd.readlink().name
                if target.startswith("socket:["):
                    yield target[8:-1], pid
        except (FileNotFoundError, ProcessLookupError):
            continue


def _decode(address: str) -> str:
    """The kernel writes addresses as 32-bit words in host byte order (little endian here)."""
    raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
    return str(ipaddress.ip_address(raw))


def _program(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    text = b" ".join(words[:4]).decode(errors="replace").strip()
    return text[:80]

"""A network of the run's own where the machine has none: NeMo RL's Dynamo wants an address that is not loopback's.

It gives Dynamo no host to listen on, and takes DYN_ variables away; so Dynamo looks for the address of the default
route, and ends where there is no route.
"""

import ctypes
import fcntl
import os
import socket
import struct

from functional.runtime.errors import ConfigError
from functional.runtime.fleet.interfaces import OUTSIDE

ADDRESS = "198.51.100.1"
"""Reserved for documentation, as OUTSIDE is: no packet for it leaves."""
CLONE_NEWNET = 0x40000000
SIOCADDRT, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x890B, 0x8914, 0x8916, 0x891C
IFF_UP, IFF_RUNNING, RTF_UP = 0x1, 0x40, 0x1
INTERFACE = b"lo"


def has_route() -> bool:
    """Whether this machine has a default route (no packet is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((OUTSIDE, 9))
        except OSError:
            return False
    return True


def enter_own_network() -> None:
    """Put this process, and what it starts from now on, into a network namespace whose loopback has an address and the
    default route. Raises ConfigError where this needs a privilege that is missing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"this machine has no default route, and a network namespace with one cannot be made ({why}): "
            "NeMo RL's Dynamo needs a route; run as root, or with a network"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _request(control, SIOCSIFFLAGS, INTERFACE, struct.pack("H", IFF_UP | IFF_RUNNING))
        _request(control, SIOCSIFADDR, INTERFACE + b":1", _address(ADDRESS))
        _request(control, SIOCSIFNETMASK, INTERFACE + b":1", _address("255.255.255.255"))
        add_default_route(control)


def _request(control: socket.socket, request: int, interface: bytes, value: bytes) -> None:
    """One request of netdevice(7), on a `struct ifreq`."""
    fcntl.ioctl(control, request, struct.pack("16s24s", interface, value))


def add_default_route(control: socket.socket) -> None:
    """Through the loopback: a `struct rtentry` of <linux/route.h>, on a machine of 64 bits."""
    name = ctypes.create_string_buffer(INTERFACE)
    zero = _address("0.0.0.0")
    route = struct.pack("L16s16s16sHhLPhPLLH", 0, zero, zero, zero, RTF_UP, 0, 0, 0, 0, ctypes.addressof(name), 0, 0, 0)
    fcntl.ioctl(control, SIOCADDRT, route)


def _address(text: str) -> bytes:
    """A `struct sockaddr_in` without a port."""
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))

"""Which interface has an address, and how Dynamo is told of it."""

import socket

import psutil

from functional.runtime.errors import RunError
from functional.runtime.recipe.environment import LOOPBACK, LOOPBACK_INTERFACE

OUTSIDE = "192.0.2.0"
"""Reserved for documentation: the way there is the default route's."""


def interface_name(address: str) -> str | None:
    """The interface that has `address`; None if there is none."""
    return next((name for name, addresses in _interfaces().items() if address in addresses), None)


def stream_interface(address: str) -> str | None:
    """What DYN_TCP_RESPONSE_STREAM_HOST has to be for Dynamo's response streams to listen on `address`; None for unset.

    It is an interface's name, of whose addresses Dynamo takes the last: a link-local one of IPv6, where there is one,
    on which it then fails to listen. Unset, Dynamo takes the address of the default route. Raises RunError where
    neither is `address`.
    """
    if address == LOOPBACK:
        return LOOPBACK_INTERFACE
    if address == _default_address():
        return None
    name = interface_name(address)
    if name is None:
        raise RunError(f"no interface of {socket.gethostname()} has the address {address}")
    if (last := _interfaces()[name][-1]) != address:
        raise RunError(
            f"Dynamo cannot listen on {address} of {socket.gethostname()}: of {name} it takes the last, {last}; "
            f"without a name the address of the default route, {_default_address()}; give the node one of these"
        )
    return name


def _default_address() -> str | None:
    """This machine's address on the default route, else its first that is not loopback (no packet is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((OUTSIDE, 9))
        except OSError:
            others = (entries for name, entries in _interfaces().items() if name != LOOPBACK_INTERFACE)
            return next((entry for entries in others for entry in entries if ":" not in entry), None)
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, list[str]]:
    """Addresses by interface, those of IPv6 behind the others."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address for family in families for entry in entries if entry.family == family]
        for name, entries in psutil.net_if_addrs().items()
    }

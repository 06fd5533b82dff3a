"""Ports come from below the ephemeral floor, are free, and are given once."""

import socket

from functional.runtime.fleet.ports import FIRST, LAST, PortRange, is_listening


def test_ports_are_in_range_and_distinct():
    ports = PortRange()
    taken = [ports.take() for _ in range(50)] + [ports.take(4)]
    assert len(set(ports.given)) == 54
    assert all(FIRST <= port < LAST for port in taken)


def test_a_port_in_use_is_passed_over():
    ports = PortRange()
    expected = ports.take() + 1
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", expected))
        occupant.listen()
        assert is_listening(expected)
        assert ports.take() != expected
    assert not is_listening(expected)

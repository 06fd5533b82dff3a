"""Ports lie outside the ephemeral range, are free, are given once, and are reserved against other runs."""

import socket
import subprocess
import sys

import pytest

from functional.runtime.errors import RunError
from functional.runtime.fleet import ports as module
from functional.runtime.fleet.ports import PREFERRED, PortRange, can_bind, ephemeral_range, is_listening, server_ports

TAKE = "from functional.runtime.fleet.ports import PortRange; p = PortRange(); p._next = {first}; print(p.take(4))"


def test_ports_are_outside_the_ephemeral_range_and_distinct():
    ports = PortRange()
    taken = [ports.take() for _ in range(50)] + [ports.take(4)]
    low, high = ephemeral_range()
    assert len(set(ports.given)) == 54
    assert all(port in server_ports(low, high) and not low <= port <= high for port in taken)


def test_a_port_in_use_is_passed_over():
    ports = PortRange()
    expected = ports.take() + 1
    with socket.socket() as occupant:
        occupant.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        occupant.bind(("127.0.0.1", expected))
        occupant.listen()
        assert is_listening(expected)
        assert not can_bind("127.0.0.1", expected)
        assert ports.take() != expected
    assert not is_listening(expected)


def test_another_process_does_not_get_a_port_that_is_given_but_not_used_yet():
    ports = PortRange()
    start = ports.take(4)

    def other():
        done = subprocess.run(
            [sys.executable, "-c", TAKE.format(first=start)], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert other() > start + 3
    del ports
    assert other() == start


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (32768, 60999, PREFERRED),
        (1024, 19999, PREFERRED),
        (9000, 65000, range(1024, 9000)),
        (25000, 60999, range(1024, 25000)),
        (1024, 30000, range(30001, 65536)),
    ],
)
def test_where_servers_may_listen(low, high, expected):
    assert server_ports(low, high) == expected


def test_no_port_is_left():
    with pytest.raises(RunError, match=r"^net.ipv4.ip_local_port_range is 1024 65535 on \S+: no port is left"):
        server_ports(1024, 65535)


def test_all_ports_are_taken(monkeypatch):
    monkeypatch.setattr(module, "PREFERRED", range(29998, 30000))
    monkeypatch.setattr(module, "ephemeral_range", lambda: (32768, 60999))
    ports = PortRange()
    assert {ports.take(), ports.take()} == {29998, 29999}
    with pytest.raises(RunError, match=r"^no free port between 29998 and 29999 on 127.0.0.1"):
        ports.take()

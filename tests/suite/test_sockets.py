"""Which sockets the suite sees: its own and those of the processes below it, each address and port once."""

import socket
import subprocess
import sys

import pytest

from functional.suite.sockets import ListeningSocket, listening_sockets


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def sockets_on(port):
    return [found for found in listening_sockets() if found.port == port]


def test_a_socket_of_this_process(listener):
    port = listener.getsockname()[1]
    (found,) = sockets_on(port)
    assert (found.address, found.port, found.is_wildcard) == ("127.0.0.1", port, False)
    assert "python" in found.program
    with socket.create_connection(("127.0.0.1", port)):
        assert sockets_on(port) == [found], "a connection is no listener"
    listener.close()
    assert sockets_on(port) == []


def test_a_socket_that_a_child_has_too_is_the_childs(listener):
    fd, port = listener.fileno(), listener.getsockname()[1]
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,)) as child:
        child.stdout.readline()
        (found,) = sockets_on(port)
        child.stdin.close()
    assert found.pid == child.pid
    assert "-c import sys" in found.program
    assert len(found.program) <= 80


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_wildcard_is_known_in_both_families(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        (found,) = sockets_on(server.getsockname()[1])
    assert found.address == address
    assert found.is_wildcard


def test_the_loopback_of_ipv6_is_no_wildcard():
    assert not ListeningSocket("::1", 1, 1, "").is_wildcard

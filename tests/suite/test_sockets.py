"""Which sockets this process and those below it listen on, and what a run left behind."""

import os
import socket
import subprocess
import sys

import pytest

from functional.runtime.fleet.sockets import command_line, listening_sockets
from functional.suite.leftovers import find_leftovers

LISTEN = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


@pytest.fixture
def child():
    """A process below this one that listens, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_own_sockets_and_those_of_children_are_found(child):
    process, port = child
    with socket.create_server(("0.0.0.0", 0)) as own, socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        client = socket.create_connection(("127.0.0.1", port))  # connected, so it is none that listens
        found = {s.port: s for s in listening_sockets()}
        assert found[own.getsockname()[1]].is_wildcard
        assert found[six.getsockname()[1]].address == "::1"
        assert not found[six.getsockname()[1]].is_wildcard
        assert (found[port].address, found[port].pid) == ("127.0.0.1", process.pid)
        assert found[port].program.startswith(f"{sys.executable} -c ")
        assert client.getsockname()[1] not in found
        client.close()


def test_what_is_left_is_named_and_what_has_ended_is_not(child, tmp_path):
    process, port = child
    left = find_leftovers(tmp_path, [port], wait_s=0)
    assert any(line.startswith(f"process {process.pid}: {sys.executable}") for line in left)
    assert f"port {port} still listens" in left
    assert f"folder {tmp_path}" in left
    process.kill()
    process.wait()
    assert command_line(process.pid) == ""
    assert not [line for line in find_leftovers(tmp_path / "gone", [port], wait_s=2) if str(process.pid) in line]


def test_first_words_of_a_command_line():
    assert command_line(os.getpid(), words=1) == command_line(os.getpid()).split(" ", maxsplit=1)[0]

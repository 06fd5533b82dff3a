"""Which sockets this process and those below it listen on, and what a run left behind."""

import os
import socket
import subprocess
import sys
import uuid

import pytest

from functional.runtime.fleet.guard import SHARED_MEMORY
from functional.runtime.fleet.sockets import command_line, listening_sockets
from functional.suite.leftovers import drop_memory, find_leftovers, mapped_memory

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


def test_shared_memory_is_the_runs_by_its_name_or_by_who_has_mapped_it(tmp_path):
    code = (
        "import sys\nfrom multiprocessing import resource_tracker, shared_memory\n"
        "m = shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)\n"
        "resource_tracker.unregister(m._name, 'shared_memory')\nprint('there', flush=True)\nsys.stdin.read()"
    )
    own, others = f"test-own-{uuid.uuid4().hex}", f"test-others-{uuid.uuid4().hex}"
    command = [sys.executable, "-c", code]
    with (
        subprocess.Popen([*command, own], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first,
        subprocess.Popen([*command, others], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as second,
    ):
        try:
            for process in (first, second):
                assert process.stdout is not None
                assert process.stdout.readline()
            found = mapped_memory([first.pid])
            assert found == {SHARED_MEMORY / own}
            assert drop_memory(found) == []
            assert (SHARED_MEMORY / own).exists(), "it is in use"
            first.kill()
            first.wait()
            assert (SHARED_MEMORY / own).exists(), "a killed process leaves it"
            folder = tmp_path / own
            assert f"shared memory {SHARED_MEMORY / own}-0" not in find_leftovers(folder, [], [folder], wait_s=0)
            (SHARED_MEMORY / f"{own}-0").touch()
            assert f"shared memory {SHARED_MEMORY / own}-0" in find_leftovers(folder, [], [folder], wait_s=0)
            assert drop_memory({*found, SHARED_MEMORY / others}) == []
            assert not (SHARED_MEMORY / own).exists()
            assert (SHARED_MEMORY / others).exists(), "another's, in use"
        finally:
            for path in SHARED_MEMORY.glob("test-o*-*"):
                if own in path.name or others in path.name:
                    path.unlink()
            for process in (first, second):
                process.kill()


def test_first_words_of_a_command_line():
    assert command_line(os.getpid(), words=1) == command_line(os.getpid()).split(" ", maxsplit=1)[0]

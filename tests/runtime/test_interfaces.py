"""How Dynamo is told of the address that its response streams listen on."""

import socket
from types import SimpleNamespace

import pytest

from functional.runtime.errors import RunError
from functional.runtime.fleet import interfaces
from functional.runtime.fleet.interfaces import interface_name, stream_interface


@pytest.fixture
def host(monkeypatch):
    """Sets what interfaces there are, and the address on the default route."""

    def set_up(default, **addresses):
        def entry(address):
            return SimpleNamespace(family=socket.AF_INET6 if ":" in address else socket.AF_INET, address=address)

        found = {name: [entry(address) for address in given] for name, given in addresses.items()}
        monkeypatch.setattr(interfaces.psutil, "net_if_addrs", lambda: found)
        monkeypatch.setattr(interfaces, "_default_address", lambda: default)

    return set_up


def test_loopback():
    assert interface_name("127.0.0.1") == "lo"
    assert stream_interface("127.0.0.1") == "lo"


def test_the_default_routes_address_needs_no_name(host):
    host("10.0.0.1", eth0=["10.0.0.1", "fe80::1"])
    assert stream_interface("10.0.0.1") is None


def test_an_interface_whose_last_address_it_is(host):
    host("10.0.0.1", eth0=["10.0.0.1", "fe80::1"], ib0=["192.0.2.9", "10.1.0.1"])
    assert interface_name("10.1.0.1") == "ib0"
    assert stream_interface("10.1.0.1") == "ib0"


@pytest.mark.parametrize("others", [["10.1.0.1", "fe80::1%ib0"], ["10.1.0.1", "10.1.0.2"]])
def test_an_interface_of_which_dynamo_takes_another_address(host, others):
    host("10.0.0.1", eth0=["10.0.0.1"], ib0=others)
    with pytest.raises(
        RunError, match=f"^Dynamo cannot listen on 10.1.0.1 of .*: of ib0 it takes the last, {others[1]};"
    ):
        stream_interface("10.1.0.1")


def test_nobody_has_it(host):
    host("10.0.0.1", eth0=["10.0.0.1"])
    with pytest.raises(RunError, match=r"^no interface of \S+ has the address 10.1.0.1$"):
        stream_interface("10.1.0.1")

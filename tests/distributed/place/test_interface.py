"""The interface of a rank: named by the user, loopback on one host, else on the route to where ranks meet."""

import socket

import pytest

from weft.distributed.place import Launch, interface
from weft.distributed.place.interface import find_interface, find_route


@pytest.fixture(autouse=True)
def no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def apart(meeting: str) -> Launch:
    return Launch("hosts", rank=1, size=4, meeting=meeting, local_size=2, local_rank=1)


def test_the_users_word_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,eth8")
    assert find_interface(apart("127.0.0.1:1")) == "eth7"


def test_one_host_needs_no_route() -> None:
    assert find_interface(Launch("torchrun", 0, 2, "nowhere.invalid:1", 2)) == "lo"


def test_an_address_of_loopback_is_meant_as_such() -> None:
    assert find_interface(apart("127.0.0.1:29500")) == "lo"


def test_a_name_that_means_loopback_here_does_not_lead_the_others_astray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes the host's own name into /etc/hosts as 127.0.1.1: others could not reach a rank there."""
    monkeypatch.setattr(interface, "find_route", lambda _: "lo")
    assert find_interface(apart("node0:29500")) is None


def test_ranks_that_have_met_by_mpi_have_no_route() -> None:
    assert find_interface(Launch("mpirun", 0, 4, "", 2)) is None


def test_the_interface_is_the_one_that_has_the_address_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"lo": "127.0.0.9", "eth0": "10.0.0.2", "eth1": "127.0.0.1"}
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(addresses)))
    monkeypatch.setattr(interface, "find_host", addresses.__getitem__)
    monkeypatch.setattr(interface, "_is_loopback", lambda address: False)
    assert find_route("127.0.0.1") == "eth1"


def test_a_name_that_nobody_knows_has_no_route() -> None:
    assert find_route("nowhere.invalid") is None

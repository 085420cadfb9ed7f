"""Where hosts meet: what listens there is a launcher of Weft, or is told in words."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from weft.engines import rendezvous as module
from weft.engines.rendezvous import Rendezvous, keep_store, reach_store, use_told_loss
from weft.errors import UsageError


@pytest.mark.parametrize("text", ["10.0.0.1", ":29500", "10.0.0.1:port", "10.0.0.1:70000"])
def test_a_rendezvous_is_an_address_and_a_port(text: str) -> None:
    with pytest.raises(UsageError, match=r"not an address and a port .* write it as 10\.0\.0\.1:29500"):
        Rendezvous.parse(text, 0, 2)


def test_hosts_count_from_zero() -> None:
    with pytest.raises(UsageError, match="no such host"):
        Rendezvous.parse("10.0.0.1:29500", 2, 2)


def test_host_0_listens_at_an_address_of_its_own() -> None:
    """Host 1 that was started as a second host 0 only read that the address cannot be assigned."""
    fact = r"host 0 cannot listen at 192\.0\.2\.1:29500 \(the address is not this host's\); is this host 0\?"
    with pytest.raises(UsageError, match=fact):
        keep_store(Rendezvous("192.0.2.1", 29500, 0, 2))


def test_host_0_needs_a_free_port(rendezvous: Callable[..., Rendezvous]) -> None:
    place = rendezvous(0)
    with socket.create_server((place.address, place.port)), pytest.raises(UsageError, match="and a free port"):
        keep_store(place)


def test_a_store_answers_as_what_it_is(rendezvous: Callable[..., Rendezvous]) -> None:
    keeper = keep_store(rendezvous(0))
    reached = reach_store(rendezvous(1), time.monotonic())
    keeper.set("word", "weft")
    assert reached.get("word") == b"weft"


@contextmanager
def use_program(place: Rendezvous, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """Another program at that place: what it does with the first who connects."""
    is_over = threading.Event()

    def run() -> None:
        with listener.accept()[0] as connection:
            answer(connection)
            is_over.wait()

    with socket.create_server((place.address, place.port)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda connection: connection.shutdown(socket.SHUT_RDWR), r"answer: b''|Connection reset by peer|Broken pipe"),
        (lambda connection: connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n"), r"answer: b'HTTP'"),
        (lambda _: None, "timed out"),
    ],
)
def test_another_program_at_the_port_is_told(
    rendezvous: Callable[..., Rendezvous],
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[socket.socket], object],
    reason: str,
) -> None:
    """They were "Connection reset by peer" and "Ping failed" in a traceback after 10 s and pages of log, and a wait for
    ever."""
    monkeypatch.setattr(module, "OPERATION_SECONDS", 0.2 if reason == "timed out" else 30.0)
    fact = rf"is not a launcher of Weft, or host 0 has ended \(({reason})\); look at the output of host 0"
    with use_program(rendezvous(0), answer), pytest.raises(UsageError, match=fact):
        reach_store(rendezvous(1), time.monotonic())


def test_a_host_0_that_ends_is_told(rendezvous: Callable[..., Rendezvous]) -> None:
    """Host 1 ended with "Failed to recv, got 0 bytes" and a traceback."""
    keeper = keep_store(rendezvous(0))
    reached = reach_store(rendezvous(1), time.monotonic())
    del keeper
    with pytest.raises(UsageError, match="or host 0 has ended"), use_told_loss(rendezvous(1)):
        reached.check(["word"])


def test_an_error_of_the_own_store_is_no_loss(rendezvous: Callable[..., Rendezvous]) -> None:
    with pytest.raises(RuntimeError, match="planted"), use_told_loss(rendezvous(0)):
        raise RuntimeError("planted")

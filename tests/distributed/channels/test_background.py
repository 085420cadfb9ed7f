"""Threads beside a block: they end with it, and the error that is raised is the one that came first."""

import threading

import pytest

from weft.distributed.channels.background import run_in_background
from weft.errors import PeerLostError, StorageError


def fail() -> None:
    raise StorageError("disk")


def nothing() -> None:
    """Ends a body that ends by itself."""


def wait_for(name: str) -> None:
    """Until the thread of this name has ended."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(30)


def test_bodies_run_to_their_end() -> None:
    done: list[str] = []
    with run_in_background(
        {"one": (lambda: done.append("one"), nothing), "two": (lambda: done.append("two"), nothing)}
    ):
        pass
    assert sorted(done) == ["one", "two"]


def test_an_error_of_a_body_is_raised_when_the_block_has_ended() -> None:
    with pytest.raises(StorageError, match="disk"), run_in_background({"one": (fail, nothing)}):
        pass


def test_a_block_that_fails_because_of_a_body_tells_of_the_body() -> None:
    """Once, all ranks told that a server was gone, and none why."""
    with pytest.raises(StorageError, match="disk") as caught, run_in_background({"one": (fail, nothing)}):
        wait_for("one")
        raise PeerLostError("server is lost", 4)
    assert isinstance(caught.value.__cause__, PeerLostError)


def test_bodies_that_are_dismissed_do_not_hide_why() -> None:
    is_dismissed = threading.Event()

    def body() -> None:
        assert is_dismissed.wait(30)
        raise StorageError("closed")

    with pytest.raises(PeerLostError, match="lost"), run_in_background({"one": (body, is_dismissed.set)}):
        raise PeerLostError("lost", 4)


def test_an_error_is_known_before_anybody_sees_the_body_gone() -> None:
    """A server leaves its peers when its mailbox is closed; then, at once, its own worker fails."""
    is_gone = threading.Event()
    with pytest.raises(StorageError, match="disk"), run_in_background({"one": (fail, is_gone.set)}):
        assert is_gone.wait(30)
        raise PeerLostError("server is lost", 4)


def test_an_interrupt_is_never_replaced() -> None:
    with pytest.raises(KeyboardInterrupt), run_in_background({"one": (fail, nothing)}):
        wait_for("one")
        raise KeyboardInterrupt

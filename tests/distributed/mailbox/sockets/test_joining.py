"""Joining among peers that do not answer: nobody is kept waiting for them, and they are not taken for gone."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.distributed.mailbox.sockets.by_hand import SECRET, connect, make_receiver, shake_hands
from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.mailbox.sockets import FolderDirectory, Member, open_mailbox
from weft.distributed.mailbox.sockets import joining as joining_module
from weft.distributed.mailbox.sockets.connections import ConnectionSettings
from weft.distributed.mailbox.sockets.endpoints import endpoint_of, listen_tcp
from weft.distributed.mailbox.sockets.handshake import Hello
from weft.distributed.mailbox.sockets.transport import SocketTransport
from weft.errors import StorageError


def open_aside(open: Callable[[], AbstractMailbox]) -> tuple[threading.Thread, list[AbstractMailbox]]:
    """Open in a thread; the mailbox is in the list when it has ended."""
    opened: list[AbstractMailbox] = []
    thread = threading.Thread(target=lambda: opened.append(open()))
    thread.start()
    return thread, opened


def test_who_calls_takes_calls_meanwhile(tmp_path: Path) -> None:
    """Once, whoever came next waited until all who had come before had answered, and took this one for gone."""
    directory, silent = FolderDirectory(tmp_path), listen_tcp("127.0.0.1")
    directory.join(Member(0, endpoint_of(silent)))
    thread, opened = open_aside(lambda: open_mailbox("tcp", directory, 1, secret=SECRET))
    while directory.read(1) is None:
        os.sched_yield()
    with connect(directory, 1) as connection:
        session = shake_hands(connection, Hello(2, 2, 1, 1, signs_bodies=False))
        silent.close()  # now it has gone
        thread.join()
    (mailbox,) = opened
    assert session is not None
    mailbox.close()


def test_one_that_has_too_many_callers_is_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = FolderDirectory(tmp_path)
    server = open_mailbox("tcp", directory, 0, secret=SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(joining_module, "MAX_HANDSHAKES", 0)
        thread, opened = open_aside(lambda: open_mailbox("tcp", directory, 1, secret=SECRET))
        while "crowded" not in server.refusals():
            os.sched_yield()
    thread.join()
    (mailbox,) = opened
    assert (mailbox.peers(), server.peers()) == ({0: 0}, {1: 1})
    mailbox.close()
    server.close()


def test_one_that_sleeps_is_joined_when_it_wakes(tmp_path: Path) -> None:
    directory, listener = FolderDirectory(tmp_path), listen_tcp("127.0.0.1")
    directory.join(Member(0, endpoint_of(listener)))
    mailbox = open_mailbox("tcp", directory, 1, secret=SECRET, timeout=0.2)
    assert mailbox.peers() == {}
    settings = ConnectionSettings(SECRET, 30.0, 10_000, signs_bodies=False)
    sleeper = SocketTransport(listener, make_receiver(0, 0), settings, None)
    sleeper.start()
    mailbox.await_peers({0}, mailbox.clock.now() + 20)
    mailbox.close()
    sleeper.close()


def test_closing_ends_the_calls(tmp_path: Path) -> None:
    directory, silent = FolderDirectory(tmp_path), listen_tcp("127.0.0.1")
    directory.join(Member(0, endpoint_of(silent)))
    open_mailbox("tcp", directory, 1, secret=SECRET, timeout=0.05).close()
    assert not any(thread.name.startswith("weft-mailbox-1") for thread in threading.enumerate())
    silent.close()


def count_memories() -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("weft-mailbox" in os.readlink(link) for link in links if os.path.lexists(link))


def test_a_mailbox_that_cannot_join_keeps_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: FolderDirectory, member: Member) -> NoReturn:
        raise StorageError("disk is full")

    monkeypatch.setattr(FolderDirectory, "join", fail)
    before = count_memories()
    with pytest.raises(StorageError):
        open_mailbox("shared_memory", FolderDirectory(tmp_path), 1, secret=SECRET)
    assert count_memories() <= before

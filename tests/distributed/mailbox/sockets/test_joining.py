"""Joining among peers that do not answer: nobody is kept waiting for them, and they are not taken for gone."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from weft.distributed.mailbox.reception import Reception
from weft.distributed.mailbox.sockets.calling import call, connect, endpoint_of, listen_on
from weft.distributed.mailbox.sockets.switchboard import Settings, Switchboard

from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.mailbox.sockets import FolderDirectory, Member, open_sockets
from weft.distributed.mailbox.sockets import switchboard as switchboard_module
from weft.distributed.mailbox.sockets.handshake import Hello
from weft.errors import StorageError

SECRET = bytes(range(32))


def open_aside(open: Callable[[], AbstractMailbox]) -> tuple[threading.Thread, list[AbstractMailbox]]:
    """Open in a thread; the mailbox is in the list when it has ended."""
    opened: list[AbstractMailbox] = []
    thread = threading.Thread(target=lambda: opened.append(open()))
    thread.start()
    return thread, opened


def test_who_calls_takes_calls_meanwhile(tmp_path: Path) -> None:
    """Once, whoever came next waited until all who had come before had answered, and took this one for gone."""
    directory, silent = FolderDirectory(tmp_path), listen_on("127.0.0.1")
    directory.join(Member(0, endpoint_of(silent)))
    thread, opened = open_aside(lambda: open_sockets("tcp", directory, 1, secret=SECRET))
    while (member := directory.read(1)) is None:
        os.sched_yield()
    with connect(member.endpoint, 5.0) as connection:
        session = call(connection, Hello(2, 2, 1, 1, signs_bodies=False), SECRET)
        silent.close()  # now it has gone
        thread.join()
    (mailbox,) = opened
    assert session is not None
    mailbox.close()


def test_one_that_has_too_many_callers_is_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = FolderDirectory(tmp_path)
    server = open_sockets("tcp", directory, 0, secret=SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(switchboard_module, "MAX_STRANGERS", 0)
        thread, opened = open_aside(lambda: open_sockets("tcp", directory, 1, secret=SECRET))
        while "crowded" not in server.refusals():
            os.sched_yield()
    thread.join()
    (mailbox,) = opened
    assert (mailbox.peers(), server.peers()) == ({0: 0}, {1: 1})
    mailbox.close()
    server.close()


def test_one_that_sleeps_is_joined_when_it_wakes(tmp_path: Path) -> None:
    directory, listener = FolderDirectory(tmp_path), listen_on("127.0.0.1")
    directory.join(Member(0, endpoint_of(listener)))
    mailbox = open_sockets("tcp", directory, 1, secret=SECRET, timeout=0.2)
    assert mailbox.peers() == {}
    sleeper = Switchboard(listener, Reception(0, 0), Settings(SECRET, 30.0, 10_000, signs_bodies=False), None)
    sleeper.start()
    mailbox.await_peers({0}, mailbox.clock.now() + 20)
    mailbox.close()
    sleeper.close()


def test_closing_ends_the_calls(tmp_path: Path) -> None:
    directory, silent = FolderDirectory(tmp_path), listen_on("127.0.0.1")
    directory.join(Member(0, endpoint_of(silent)))
    open_sockets("tcp", directory, 1, secret=SECRET, timeout=0.05).close()
    calls = [thread for thread in threading.enumerate() if thread.name == "weft-mailbox-1-calls"]
    for thread in calls:
        thread.join(30)
    assert not any(thread.is_alive() for thread in calls)
    silent.close()


def count_memories() -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("weft-mailbox" in os.readlink(link) for link in links if os.path.lexists(link))


def test_one_that_cannot_enter_the_roll_keeps_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: FolderDirectory, member: Member) -> NoReturn:
        raise StorageError("disk is full")

    monkeypatch.setattr(FolderDirectory, "join", fail)
    before = count_memories()
    with pytest.raises(StorageError):
        open_sockets("shared_memory", FolderDirectory(tmp_path), 1, secret=SECRET)
    assert count_memories() <= before

"""When something fails on this side: one connection ends and is counted, or all who wait are told. Nobody hangs."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from weft.distributed.mailbox.reception import Reception
from weft.distributed.mailbox.sockets.calling import call, connect, endpoint_of, listen_here
from weft.distributed.mailbox.sockets.memory import SharedBodies
from weft.distributed.mailbox.sockets.switchboard import READ, Settings, Switchboard

from weft.distributed.mailbox import LEFT, AbstractMailbox
from weft.distributed.mailbox.sockets import FolderDirectory, open_sockets
from weft.distributed.mailbox.sockets.frames import Kind, pack_head
from weft.distributed.mailbox.sockets.handshake import Hello
from weft.errors import TrainingError

SECRET = bytes(range(32))


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def check_still_serving(server: AbstractMailbox, peer: AbstractMailbox) -> None:
    peer.send(server.address, "push", {"step": 2})
    assert server.receive("push", peer.address, deadline=server.clock.now() + 10).header == {"step": 2}


def test_a_body_that_no_memory_is_left_for_ends_its_link_only(tmp_path: Path) -> None:
    """Once, it ended the thread, and the mailbox without a word."""
    directory = FolderDirectory(tmp_path)
    server = open_sockets("tcp", directory, 0, secret=SECRET, max_bytes=2**60)
    server.follow_peers()
    bystander = open_sockets("tcp", directory, 2, secret=SECRET)
    member = directory.read(0)
    assert member is not None
    with connect(member.endpoint, 5.0) as connection:
        session = call(connection, Hello(1, 5, 0, 0, signs_bodies=False), SECRET)
        assert session is not None
        count = 2**47  # more than a process has addresses for
        meta = f'[["push",[["float32",{count}]],[]],{{}}]'.encode()
        connection.sendall(pack_head(session.keys.send, Kind.MESSAGE, 0, meta, 4 * count) + meta)
        note = server.receive(LEFT, 1, deadline=server.clock.now() + 10)
    assert note.header["reason"].startswith("what it sent could not be taken: ")
    assert server.refusals() == {"failed": 1}
    check_still_serving(server, bystander)
    bystander.close()
    server.close()


def test_a_peer_whose_memory_cannot_be_opened_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = FolderDirectory(tmp_path)
    server, bystander = (open_sockets("shared_memory", directory, address, secret=SECRET) for address in (0, 2))
    member = directory.read(0)
    assert member is not None
    with monkeypatch.context() as patch, connect(member.endpoint, 5.0) as connection:
        patch.setattr(SharedBodies, "meet", raising(OSError(errno.EMFILE, "too many open files")))
        assert call(connection, Hello(1, 5, 0, 0, signs_bodies=False), SECRET) is None
    assert server.refusals() == {"failed": 1}
    check_still_serving(server, bystander)
    bystander.close()
    server.close()


def test_who_waits_is_told_when_the_mailbox_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = open_sockets("tcp", FolderDirectory(tmp_path), 0, secret=SECRET, timeout=0.1)
    receive = mailbox.start_receive("never")
    monkeypatch.setattr(Switchboard, "_tend", raising(OSError("the disk is on fire")))
    with pytest.raises(TrainingError, match=r"mailbox has failed \(address: 0, cause: OSError: the disk is on fire\)"):
        receive.wait(mailbox.clock.now() + 10)
    with pytest.raises(TrainingError, match="mailbox has failed"):
        mailbox.send(0, "push")
    mailbox.close()


class Unwatched:
    """A switchboard whose thread does not run: its steps are taken by the test."""

    def __init__(self, listener: socket.socket) -> None:
        self.reception = Reception(0, 0)
        settings = Settings(SECRET, timeout=30.0, max_bytes=10_000, signs_bodies=False)
        self.board: Any = Switchboard(listener, self.reception, settings, None)

    def is_called(self) -> bool:
        return bool(self.board._selector.select(0))


class Exhausted(socket.socket):
    """A listener in a process that has no descriptors left."""

    def accept(self) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")


def test_a_call_that_there_is_no_descriptor_for_waits_without_work() -> None:
    with Exhausted(socket.AF_UNIX, socket.SOCK_STREAM, 0, listen_here().detach()) as listener:
        scene = Unwatched(listener)
        with connect(endpoint_of(listener), 5.0):
            assert scene.is_called()
            scene.board._take_call(READ)
            assert not scene.is_called()
            scene.board._tend(scene.board._looked_at + 1.0)
            assert scene.is_called()
        scene.board._give_back()


def test_a_bell_that_is_closed_is_not_rung() -> None:
    """Once, whatever file had its number by then was written to."""
    scene = Unwatched(listen_here())
    number, (reader, writer) = scene.board._bell, os.pipe()
    scene.board._give_back()
    os.dup2(writer, number)
    scene.board._ring()
    os.close(writer)
    os.close(number)
    assert os.read(reader, 8) == b""
    os.close(reader)

"""When something fails on this side: one connection ends and is counted, or all who wait are told. Nobody hangs."""

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.distributed.mailbox.sockets.by_hand import SECRET, connect, make_receiver, shake_hands
from weft.distributed.mailbox import LEFT, AbstractMailbox
from weft.distributed.mailbox.sockets import FolderDirectory, Member, open_mailbox
from weft.distributed.mailbox.sockets.connections import Connections, ConnectionSettings
from weft.distributed.mailbox.sockets.endpoints import endpoint_of, listen_unix
from weft.distributed.mailbox.sockets.frames import Kind, pack_head
from weft.distributed.mailbox.sockets.handshake import Hello
from weft.distributed.mailbox.sockets.shared_bodies import SharedBodies
from weft.distributed.mailbox.sockets.transport import SocketTransport
from weft.errors import TrainingError


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def check_still_serving(server: AbstractMailbox, peer: AbstractMailbox) -> None:
    peer.send(server.address, "push", {"step": 2})
    assert server.receive("push", peer.address, deadline=server.clock.now() + 10).header == {"step": 2}


def test_a_body_that_no_memory_is_left_for_ends_its_connection_only(tmp_path: Path) -> None:
    """Once, it ended the thread, and the mailbox without a word."""
    directory = FolderDirectory(tmp_path)
    server = open_mailbox("tcp", directory, 0, secret=SECRET, max_bytes=2**60)
    server.follow_peers()
    bystander = open_mailbox("tcp", directory, 2, secret=SECRET)
    with connect(directory) as connection:
        session = shake_hands(connection, Hello(1, 5, 0, 0, signs_bodies=False))
        assert session is not None
        count = 2**47  # more than a process has addresses for
        meta = f'[["push",[["float32",{count}]],[]],{{}}]'.encode()
        connection.sendall(pack_head(session.send_key, Kind.MESSAGE, 0, meta, 4 * count) + meta)
        note = server.receive(LEFT, 1, deadline=server.clock.now() + 10)
    assert note.header["reason"].startswith("what it sent could not be taken: ")
    assert server.refusals() == {"failed": 1}
    check_still_serving(server, bystander)
    bystander.close()
    server.close()


def test_a_peer_whose_memory_cannot_be_opened_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = FolderDirectory(tmp_path)
    server, bystander = (open_mailbox("shared_memory", directory, address, secret=SECRET) for address in (0, 2))
    with monkeypatch.context() as patch, connect(directory) as connection:
        patch.setattr(SharedBodies, "attach", raising(OSError(errno.EMFILE, "too many open files")))
        assert shake_hands(connection, Hello(1, 5, 0, 0, signs_bodies=False)) is None
    assert server.refusals() == {"failed": 1}
    check_still_serving(server, bystander)
    bystander.close()
    server.close()


def test_who_waits_is_told_when_the_mailbox_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = open_mailbox("tcp", FolderDirectory(tmp_path), 0, secret=SECRET, timeout=0.1)
    receive = mailbox.start_receive("never")
    monkeypatch.setattr(Connections, "check", raising(OSError("the disk is on fire")))
    with pytest.raises(TrainingError, match=r"mailbox has failed \(address: 0, cause: OSError: the disk is on fire\)"):
        receive.wait(mailbox.clock.now() + 10)
    with pytest.raises(TrainingError, match="mailbox has failed"):
        mailbox.send(0, "push")
    mailbox.close()


class Exhausted(socket.socket):
    """A listener in a process that has no descriptors left for a while."""

    num_refused = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_refused < 3:
            self.num_refused += 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_a_call_that_there_is_no_descriptor_for_waits_without_work(tmp_path: Path) -> None:
    """Tried again after a pause each time, not at once and without end."""
    directory = FolderDirectory(tmp_path)
    listener = Exhausted(socket.AF_UNIX, socket.SOCK_STREAM, 0, listen_unix().detach())
    directory.join(Member(0, endpoint_of(listener)))
    receiver = make_receiver(0, 0)
    transport = SocketTransport(listener, receiver, ConnectionSettings(SECRET, 30.0, 10_000, signs_bodies=False), None)
    transport.start()
    with connect(directory) as connection:
        assert shake_hands(connection, Hello(1, 5, 0, 0, signs_bodies=False)) is not None
    assert (listener.num_refused, receiver.roster.latest) == (3, {1: 5})
    transport.close()


def test_a_callback_that_raises_is_told_to_all_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop itself would only log it."""
    directory = FolderDirectory(tmp_path)
    mailbox = open_mailbox("tcp", directory, 0, secret=SECRET)
    receive = mailbox.start_receive("never")
    with connect(directory) as connection:
        assert shake_hands(connection, Hello(1, 5, 0, 0, signs_bodies=False)) is not None
        monkeypatch.setattr(Connections, "_drop", raising(OSError("the disk is on fire")))
    with pytest.raises(TrainingError, match="cause: OSError: the disk is on fire"):
        receive.wait(mailbox.clock.now() + 10)
    mailbox.close()

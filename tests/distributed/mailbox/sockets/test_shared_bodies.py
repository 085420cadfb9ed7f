"""Bodies in shared memory: what is read is what was sent, also by a peer that slept meanwhile."""

import socket
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.distributed.mailbox.sockets.by_hand import make_receiver
from weft.distributed.mailbox import Message
from weft.distributed.mailbox.sockets.connection import Connection, ConnectionEndedError
from weft.distributed.mailbox.sockets.handshake import Session
from weft.distributed.mailbox.sockets.shared_bodies import SharedBodies
from weft.errors import DeadlineError, PeerLostError, UsageError

SIZE = 20_000


class Pair:
    """A sender and a receiver whose loops are run by the test: the receiver sleeps until it is told to read."""

    def __init__(self) -> None:
        self.bodies = [SharedBodies(lambda number: self.bodies[number].invitation) for _ in range(2)]
        self.receivers = [make_receiver(address, address) for address in range(2)]
        keys = [(bytes(32), bytes(range(32))), (bytes(range(32)), bytes(32))]
        ends = socket.socketpair()
        for me in range(2):
            assert self.bodies[me].attach(1 - me)
        self.sender, self.receiver = (
            Connection(
                ends[me],
                Session(1 - me, 1 - me, *keys[me], signs_bodies=False),
                self.receivers[me],
                max_bytes=10**9,
                bodies=self.bodies[me],
                on_blocked=lambda _: None,
            )
            for me in range(2)
        )

    def empty(self) -> Tensor:
        return self.bodies[0].empty((SIZE,), torch.float32)

    def poll(self) -> Message | None:
        try:
            return self.receivers[1].start_receive("push", None, None).wait(0.0)
        except DeadlineError:
            return None

    def close(self) -> None:
        self.sender.close("the test is over")
        self.receiver.close("the test is over")
        for bodies in self.bodies:
            bodies.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_revoked_block_is_not_delivered(pair: Pair, is_in_place: bool) -> None:
    """Once, a peer that was stopped until the sender gave it up took the next owner's bytes for the message's."""
    tensor = (pair.empty() if is_in_place else torch.empty(SIZE)).fill_(1.0)
    work = pair.sender.send_message("push", b"{}", (tensor,))
    pair.sender.close("silent for 30 s")
    if is_in_place:
        with pytest.raises(PeerLostError, match="silent for 30 s"):
            work.wait()
        tensor.fill_(7.0)
    else:
        pair.empty().fill_(7.0)  # where the copy was
    with pytest.raises(ConnectionEndedError, match="it has given this peer up"):
        pair.receiver.read()
    assert pair.poll() is None


def test_a_message_that_cannot_be_sent_keeps_no_memory(pair: Pair) -> None:
    place = pair.empty().data_ptr()
    with pytest.raises(UsageError, match="too many tensors"):
        pair.sender.send_message("push", b"{}", (torch.ones(8),) * 5000)
    assert pair.empty().data_ptr() == place


def test_the_last_messages_of_a_mailbox_that_closes_can_still_be_read(pair: Pair) -> None:
    pair.sender.send_message("push", b"{}", (torch.ones(SIZE),))
    pair.sender.close("this mailbox has closed", is_last=True)
    pair.empty().fill_(7.0)
    with pytest.raises(ConnectionEndedError, match="it died"):
        pair.receiver.read()
    message = pair.poll()
    assert message is not None
    assert torch.equal(message.tensors[0], torch.ones(SIZE))

"""Many sends at once: frames never mix, and what is under way ends with the connection."""

import threading
from pathlib import Path

import pytest
import torch

from weft.distributed.mailbox import MailboxKind, open_mailbox
from weft.errors import PeerLostError

SECRET = bytes(32)
KINDS: list[MailboxKind] = ["tcp", "shared_memory"]


@pytest.mark.parametrize("kind", KINDS)
def test_threads_of_one_peer_send_side_by_side(tmp_path: Path, kind: MailboxKind) -> None:
    receiver, sender = (open_mailbox(kind, tmp_path, address, secret=SECRET) for address in (0, 1))
    sizes = [1, 40_000, 7, 200_000]

    def send(number: int) -> None:
        for step in range(8):
            sender.send(0, f"thread {number}", {"step": step}, [torch.full((sizes[(number + step) % 4],), float(step))])

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for number in range(4):
        for step in range(8):
            message = receiver.receive(f"thread {number}", 1, deadline=receiver.clock.now() + 20)
            assert message.header == {"step": step}
            assert torch.equal(message.tensors[0], torch.full((sizes[(number + step) % 4],), float(step)))
    for thread in threads:
        thread.join()
    for mailbox in (sender, receiver):
        mailbox.close()


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_send_much_and_then_receive(tmp_path: Path, kind: MailboxKind) -> None:
    """Nobody waits for the other to receive first."""
    pair = [open_mailbox(kind, tmp_path, address, secret=SECRET) for address in (0, 1)]
    tensors = [mailbox.empty((3_000_000,)).fill_(mailbox.address) for mailbox in pair]
    works = [mailbox.start_send(1 - mailbox.address, "much", {}, [tensors[mailbox.address]]) for mailbox in pair]
    for work in works:
        work.wait()
    for mailbox in pair:
        (tensor,) = mailbox.receive("much", deadline=mailbox.clock.now() + 20).tensors
        assert torch.equal(tensor, tensors[1 - mailbox.address])
    for mailbox in pair:
        mailbox.close()


@pytest.mark.parametrize("kind", KINDS)
def test_closing_finishes_what_was_started(tmp_path: Path, kind: MailboxKind) -> None:
    receiver, sender = (open_mailbox(kind, tmp_path, address, secret=SECRET) for address in (0, 1))
    works = [sender.start_send(0, "last", {}, [torch.ones(1_000_000)]) for _ in range(3)]
    sender.close()
    for work in works:
        work.wait()
    for _ in range(3):
        assert float(receiver.receive("last", 1).tensors[0].sum()) == 1_000_000
    with pytest.raises(PeerLostError, match="it left"):
        receiver.receive("last", 1)
    with pytest.raises(PeerLostError, match="it left"):
        receiver.send(1, "anything", {}, [torch.ones(100_000)])
    receiver.close()

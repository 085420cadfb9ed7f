"""A process that opens a mailbox and writes without end, for tests that kill it."""

import torch

from weft.distributed.mailbox import MailboxKind, open_mailbox


def main(folder: str, kind: MailboxKind) -> None:
    mailbox = open_mailbox(kind, folder, 1)
    mailbox.await_peers({0})
    gradient = torch.ones(500_000)
    while True:
        mailbox.send(0, "push", {}, [gradient])

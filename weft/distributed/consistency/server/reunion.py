"""What a server does first that takes the place of one that was lost: look who of the workers is still there."""

from collections.abc import Collection
from contextlib import suppress

from weft.distributed.mailbox import AbstractMailbox
from weft.errors import DeadlineError

__all__ = ["find_missing"]

REUNION_SECONDS = 2.0
"""How long it looks for them."""


def find_missing(mailbox: AbstractMailbox, workers: Collection[int]) -> set[int]:
    """The workers that have died or ended before: nobody will say that they leave."""
    with suppress(DeadlineError):
        mailbox.await_peers(workers, mailbox.clock.now() + REUNION_SECONDS)
    return set(workers) - mailbox.peers().keys()

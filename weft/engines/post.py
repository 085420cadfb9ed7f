"""From a place to a mailbox: how ranks, and servers beside them, open one in the run that they were started for."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from weft.distributed.mailbox import AbstractMailbox, LocalTransport, MailboxKind, StoreDirectory, open_mailbox
from weft.engines.meeting import open_notes
from weft.engines.place import Place
from weft.errors import UsageError

__all__ = ["join_post"]


def join_post(
    place: Place,
    kind: MailboxKind | Literal["auto"] = "auto",
    *,
    address: int | None = None,
    known: Collection[int] | None = None,
    timeout: float = 30.0,
) -> AbstractMailbox:
    """The mailbox of this rank, or of a server process that was started beside the ranks of a run.

    `auto` is shared memory where all ranks are on one host, else TCP on the interface that GLOO_SOCKET_IFNAME names.
    Peers may join in any order and at any time; wait for those that are needed with `await_peers`. The run's secret is
    what `weft run` left in the folder where its ranks meet; ranks that others started need WEFT_SECRET.

    Args:
        address: by default the rank; servers that are no ranks take numbers from `place.size` on.
        known: the addresses that peers may have; None for any.
        timeout: seconds after which a silent peer counts as lost.

    >>> mailbox = join_post(Place("nobody"))
    >>> mailbox.address, mailbox.peers()
    (0, {})
    >>> mailbox.close()
    """
    own = place.rank if address is None else address
    if place.starter == "nobody":
        return LocalTransport().open(own)
    chosen: MailboxKind = ("shared_memory" if place.is_one_host else "tcp") if kind == "auto" else kind
    if chosen == "shared_memory" and not place.is_one_host:
        raise UsageError(
            f"shared memory joins ranks of one host (ranks: {place.size}, here: {place.local_size}); use tcp"
        )
    interface = "lo" if place.is_one_host else _need_interface()
    if place.starter == "weft":
        folder = Path(place.meeting)
        return open_mailbox(chosen, folder, own, timeout=timeout, interface=interface, known=known)
    directory = StoreDirectory(open_notes(place, timeout))
    return open_mailbox(chosen, directory, own, timeout=timeout, interface=interface, known=known)


def _need_interface() -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not interface:
        raise UsageError("mailbox does not know where to listen; name the interface in GLOO_SOCKET_IFNAME")
    return interface

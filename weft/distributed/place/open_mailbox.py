"""The mailbox of a rank, or of a server beside it, in the run that it was started for."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from weft.distributed.mailbox import AbstractMailbox, LocalTransport, MailboxKind, StoreDirectory, open_mailbox
from weft.distributed.place.interface import INTERFACE_VARIABLE, find_interface
from weft.distributed.place.launch import Launch
from weft.distributed.place.meeting import note_meeting
from weft.distributed.place.open_group import open_store
from weft.errors import UsageError

__all__ = ["open_launched_mailbox"]


def open_launched_mailbox(
    launch: Launch,
    kind: MailboxKind | Literal["auto"] = "auto",
    *,
    address: int | None = None,
    known: Collection[int] | None = None,
    timeout: float = 30.0,
) -> AbstractMailbox:
    """The mailbox of this rank, or of a server process that was started beside the ranks of a run.

    `auto` is shared memory where all ranks are on one host, else TCP on the interface of `find_interface`.
    Peers may join in any order and at any time; wait for those that are needed with `await_peers`. The run's secret is
    what `weft run` left in the folder where its ranks meet; ranks of several hosts, and those that others started, need
    WEFT_SECRET.

    Args:
        address: by default the rank; servers that are no ranks take numbers from `launch.size` on.
        known: the addresses that peers may have; None for any.
        timeout: seconds after which a silent peer counts as lost.

    >>> mailbox = open_launched_mailbox(Launch("nobody"))
    >>> mailbox.address, mailbox.peers()
    (0, {})
    >>> mailbox.close()
    """
    note_meeting()
    own = launch.rank if address is None else address
    if launch.launcher == "nobody":
        return LocalTransport().open(own)
    chosen: MailboxKind = ("shared_memory" if launch.is_one_host else "tcp") if kind == "auto" else kind
    if chosen == "shared_memory" and not launch.is_one_host:
        raise UsageError(
            f"shared memory joins ranks of one host (ranks: {launch.size}, here: {launch.local_size}); use tcp"
        )
    interface = "lo" if launch.is_one_host else _need_interface(launch)
    is_weft = launch.launcher == "weft"
    directory = Path(launch.meeting) if is_weft else StoreDirectory(open_store(launch, timeout))
    return open_mailbox(chosen, directory, own, timeout=timeout, interface=interface, known=known)


def _need_interface(launch: Launch) -> str:
    interface = find_interface(launch)
    if interface is None:
        raise UsageError(f"mailbox does not know where to listen; name the interface in {INTERFACE_VARIABLE}")
    return interface

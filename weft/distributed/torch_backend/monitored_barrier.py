"""A barrier that names the ranks that did not come: all report to rank 0, which answers when it has heard of all.

The texts are torch's: programs and its own suite look for them.
"""

import time
from datetime import timedelta

import torch

from weft.distributed.group.calls import Recv, Send
from weft.distributed.group.group import AbstractGroup
from weft.distributed.torch_backend.work import ends_before
from weft.errors import DeadlineError, PeerLostError

__all__ = ["run_monitored_barrier"]

ALL_CAME, SOME_MISSING = 1, 0


def run_monitored_barrier(group: AbstractGroup, tag: int, timeout: timedelta, *, wait_all_ranks: bool) -> None:
    """Return when all ranks have come.

    Args:
        tag: of its messages; the same on all ranks, and another one for each barrier, as one that failed leaves some.
        wait_all_ranks: rank 0 names all that are missing and not the first alone.

    Raises:
        DeadlineError: ranks did not come in time. Rank 0 names them; the others refer to it.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if group.rank == 0:
        _hear_all(group, tag, timeout, deadline, wait_all_ranks=wait_all_ranks)
    else:
        _report(group, tag, deadline)


def _hear_all(group: AbstractGroup, tag: int, timeout: timedelta, deadline: float, *, wait_all_ranks: bool) -> None:
    milliseconds = f"{timeout / timedelta(milliseconds=1):g} ms"
    if timeout <= timedelta(0):
        raise DeadlineError(f"Rank 0 timed out in monitoredBarrier after {milliseconds}; give it more time", peers=())
    peers = range(1, group.size)
    reports = {peer: group.start(Recv(torch.empty(1), peer, tag)) for peer in peers}
    missing: list[int] = []
    for peer, report in reports.items():
        if not ends_before([report], deadline):
            missing.append(peer)
            if not wait_all_ranks:
                break
    answer = torch.tensor([float(SOME_MISSING if missing else ALL_CAME)])
    for peer, report in reports.items():
        if report.is_done() and peer not in missing:
            group.start(Send(answer, peer, tag))
    if missing:
        who = f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, missing))}"
        raise DeadlineError(
            f"{who} failed to pass monitoredBarrier in {milliseconds}; look at what they do", peers=tuple(missing)
        )


def _report(group: AbstractGroup, tag: int, deadline: float) -> None:
    answer = torch.zeros(1)
    try:
        group.start(Send(torch.ones(1), 0, tag))
        heard = ends_before([group.start(Recv(answer, 0, tag))], deadline)
    except PeerLostError:
        heard = False
    if not heard or answer != ALL_CAME:
        raise DeadlineError(
            f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            "from rank 0; look at the error of rank 0, which names the ranks that are missing",
            peers=(0,),
        )

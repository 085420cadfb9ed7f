"""One core for a simulation, and another for the next one.

A core is claimed by the name of a Unix socket that is no file (Linux): two processes cannot hold one name, and the
kernel gives it back when a process ends, however it ends.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["claim_core", "use_one_core"]


@contextmanager
def use_one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core: only one of them ever runs, and to wake it on another
    core takes longer than most of what it then does. Where all cores are taken, the first one is shared."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    core, claim = next(((core, claim) for core in cores if (claim := claim_core(core))), (cores[0], None))
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        if claim is not None:
            claim.close()


def claim_core(core: int) -> socket.socket | None:
    """Something to hold and to close, or None where another holds it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0weft-core-{core}")
    except OSError:
        claim.close()
        return None
    return claim

"""Where the launchers of several hosts meet: an address of host 0, and the store that it keeps there.

    VALIDATE, PING    host 1 ----> host 0    a store echoes a number; another program does not
    the store         host 1 <---> host 0    notes of launchers, addresses of ranks

Other hosts open the store only when it has echoed: what else may listen at that port is told in words.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from errno import EADDRNOTAVAIL
from typing import Any

from weft.errors import UsageError

__all__ = ["OPERATION_SECONDS", "POLL_SECONDS", "Rendezvous", "keep_store", "reach_store", "use_told_loss"]

POLL_SECONDS = 0.05
CONNECT_SECONDS = 1.0
OPERATION_SECONDS = 10.0

# The store's own greeting, as torch/csrc/distributed/c10d/TCPStoreBackend.hpp has it: VALIDATE, a magic number, PING.
GREETING = struct.pack("=BIB", 0, 0x3C85F7CE, 13)
# The number that a ping brings back. Programs that read lines see one end, and answer at once.
ECHO = b"\r\n\r\n"

LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass(frozen=True)
class Rendezvous:
    """Where the hosts of a launch meet, and which of them this one is.

    Args:
        address: of host 0, as all hosts reach it.
        timeout: seconds in which all must have come.
    """

    address: str
    port: int
    host_rank: int
    num_hosts: int
    timeout: float = 300.0

    @staticmethod
    def parse(text: str, host_rank: int, num_hosts: int, timeout: float = 300.0) -> "Rendezvous":
        """
        >>> Rendezvous.parse("10.0.0.1:29500", 1, 2)
        Rendezvous(address='10.0.0.1', port=29500, host_rank=1, num_hosts=2, timeout=300.0)

        Raises:
            UsageError: the text is no address and port, or there is no such host.
        """
        address, _, port = text.rpartition(":")
        if not address or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"rendezvous is not an address and a port ({text}); write it as 10.0.0.1:29500")
        if not 0 <= host_rank < num_hosts:
            cure = "count hosts from 0"
            raise UsageError(f"there is no such host (--host-rank: {host_rank}, --num-hosts: {num_hosts}); {cure}")
        return Rendezvous(address, int(port), host_rank, num_hosts, timeout)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def keep_store(rendezvous: Rendezvous) -> Any:
    """The store, in host 0.

    Raises:
        UsageError: it cannot listen there.
    """
    c10d = _import_c10d()
    try:
        # Bound by hand to the one address: left to itself, the store listens on all interfaces.
        listener = socket.create_server((rendezvous.address, rendezvous.port), backlog=512)
    except OSError as error:
        reason, cure = error.strerror, "give an address of host 0 and a free port"
        if error.errno == EADDRNOTAVAIL:
            reason = "the address is not this host's"
            cure = "is this host 0? --host-rank 0 must run where that address is"
        raise UsageError(f"host 0 cannot listen at {rendezvous} ({reason}); {cure}") from None
    return c10d.TCPStore(
        rendezvous.address,
        rendezvous.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=OPERATION_SECONDS),
    )


def reach_store(rendezvous: Rendezvous, deadline: float) -> Any:
    """The store, in any other host, when it is there.

    Raises:
        UsageError: nobody listens there before the deadline, or what does is no store.
    """
    c10d = _import_c10d()
    _await_answer(rendezvous, deadline)
    timeout = timedelta(seconds=OPERATION_SECONDS)
    with use_told_loss(rendezvous):
        return c10d.TCPStore(
            rendezvous.address, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout
        )


@contextmanager
def use_told_loss(rendezvous: Rendezvous) -> Iterator[None]:
    """The store of another host can end at any moment, and torch.distributed has many words for that."""
    try:
        yield
    except RuntimeError as error:
        if rendezvous.host_rank == 0:
            raise
        raise _tell_stranger(rendezvous, str(error).partition("\n")[0]) from None


def _await_answer(rendezvous: Rendezvous, deadline: float) -> None:
    """Plain connections: the store's own attempts cannot be interrupted, wait for ever for a program that says
    nothing, and fill the log."""
    while True:
        try:
            connection = socket.create_connection((rendezvous.address, rendezvous.port), CONNECT_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                about = f"{rendezvous}: {error.strerror or error}"
                cure = "start the same command on host 0, whose address this is"
                text = f"host 0 did not answer within {rendezvous.timeout:g} s ({about}); {cure}"
                raise UsageError(text) from None
            time.sleep(POLL_SECONDS)
            continue
        with connection:
            if reason := _find_wrong(connection):
                raise _tell_stranger(rendezvous, reason)
            return


def _find_wrong(connection: socket.socket) -> str | None:
    """How what listens there does not answer as a store does, in words."""
    connection.settimeout(OPERATION_SECONDS)
    try:
        connection.sendall(GREETING + ECHO)
        with connection.makefile("rb") as answers:
            answer = answers.read(len(ECHO))
    except OSError as error:
        return error.strerror or str(error)
    return None if answer == ECHO else f"answer: {answer!r}"


def _tell_stranger(rendezvous: Rendezvous, reason: str) -> UsageError:
    cure = "look at the output of host 0, or give a free port"
    return UsageError(f"what answers at {rendezvous} is not a launcher of Weft, or host 0 has ended ({reason}); {cure}")


def _import_c10d() -> Any:
    """torch.distributed, whose stubs lack the stores. In a launcher its C++ part keeps its warnings for itself, as of
    addresses for which no name is found: what goes wrong with the store, launchers tell. Ranks warn as ever."""
    is_ours = LOG_LEVEL not in os.environ and "torch" not in sys.modules
    if is_ours:
        os.environ[LOG_LEVEL] = "ERROR"  # read once, by this import
    try:
        import torch.distributed as distributed
    finally:
        if is_ours:
            os.environ.pop(LOG_LEVEL, None)
    return distributed

"""How the ranks of one host find the segment that rank 0 made: an invitation that names its process and descriptor.

The segment is anonymous memory of rank 0, opened by the others through /proc. It has no name, so nothing can be left
behind, whoever is killed when; and it is not bound by the size of /dev/shm, which containers keep small.
"""

import os
import time
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import final

from weft.atomic import write_text
from weft.distributed.group.liveness import Store

__all__ = ["AbstractRendezvous", "FolderRendezvous", "Invitation", "StoreRendezvous", "read_start_time"]

POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Invitation:
    """An open descriptor of a process that is told from a later one with the same number by its start time (ticks)."""

    pid: int
    start_time: int
    descriptor: int

    @staticmethod
    def parse(text: str) -> "Invitation":
        pid, start_time, descriptor = map(int, text.split())
        return Invitation(pid, start_time, descriptor)

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))

    def open(self) -> int | None:
        """A descriptor of our own for the same memory; None where the process is gone."""
        if read_start_time(self.pid) != self.start_time:
            return None
        try:
            return os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: it ends at this moment
            return None


class AbstractRendezvous(ABC):
    """One invitation from rank 0 to all others."""

    @abstractmethod
    def publish(self, invitation: Invitation) -> None: ...

    @abstractmethod
    def fetch(self, deadline: float) -> Invitation | None:
        """The invitation, or None when there is none by the deadline (of time.monotonic). May give an old one."""

    @abstractmethod
    def withdraw(self) -> None:
        """Called by rank 0 when all have come, or when it gave up."""


@final
class FolderRendezvous(AbstractRendezvous):
    """Through a file in a folder that all ranks can see: no port, any order of start."""

    def __init__(self, folder: Path, generation: int) -> None:
        self._path = folder / f"segment-{generation}.json"

    def publish(self, invitation: Invitation) -> None:
        write_text(self._path, str(invitation))

    def fetch(self, deadline: float) -> Invitation | None:
        while not self._path.exists():
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        try:
            return Invitation.parse(self._path.read_text())
        except FileNotFoundError:  # withdrawn between the two lines
            return None

    def withdraw(self) -> None:
        self._path.unlink(missing_ok=True)


@final
class StoreRendezvous(AbstractRendezvous):
    """Through a store of torch.distributed that is used for one group alone."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, invitation: Invitation) -> None:
        self._store.set("invitation", str(invitation))

    def fetch(self, deadline: float) -> Invitation | None:
        while not self._store.check(["invitation"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        return Invitation.parse(self._store.get("invitation").decode())

    def withdraw(self) -> None:
        """Nothing to do: one that names a process which is gone, or has closed its segment, invites nobody."""


def read_start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when there is none, or a dead one that nobody has reaped."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return None
    state, *numbers = after_name.split()
    return None if state in "ZX" else int(numbers[18])

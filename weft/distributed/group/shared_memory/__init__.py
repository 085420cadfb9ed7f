"""Ranks of one host through shared memory."""

from weft.distributed.group.shared_memory.engine import Timing
from weft.distributed.group.shared_memory.group import SharedMemoryGroup
from weft.distributed.group.shared_memory.rendezvous import (
    AbstractRendezvous,
    FolderRendezvous,
    Invitation,
    StoreRendezvous,
)
from weft.distributed.group.shared_memory.work import SharedMemoryWork

__all__ = [
    "AbstractRendezvous",
    "FolderRendezvous",
    "Invitation",
    "SharedMemoryGroup",
    "SharedMemoryWork",
    "StoreRendezvous",
    "Timing",
]

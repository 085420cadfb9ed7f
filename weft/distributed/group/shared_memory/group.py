"""The shared-memory group: ranks of one host, reduced by compiled kernels, with no copy for tensors of `empty()`."""

import os
import warnings
import weakref
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import AllGather, Call
from weft.distributed.group.clock import AbstractClock, RealClock
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.shared_memory import native
from weft.distributed.group.shared_memory.arena import Arena
from weft.distributed.group.shared_memory.engine import AbstractEngine, Outcome, Reason, Timing
from weft.distributed.group.shared_memory.fallback import PythonEngine
from weft.distributed.group.shared_memory.rendezvous import (
    AbstractRendezvous,
    FolderRendezvous,
    Invitation,
    read_start_time,
)
from weft.distributed.group.shared_memory.request import lower
from weft.distributed.group.shared_memory.segment import MAX_RANKS, Membership, Segment, join_segment
from weft.errors import CompilerError, PeerLostError, UsageError

__all__ = ["SharedMemoryGroup", "SharedMemoryWork"]

MAX_OPEN = 64  # works that may go on without their owner before the ended ones among them are let go


@final
class SharedMemoryGroup(AbstractGroup):
    """Ranks of one host through shared memory.

    Args:
        rendezvous: a folder that all ranks can see, or another way to meet.
        rank, size: this rank and the number of ranks.
        timeout: seconds after which a silent peer counts as lost; a dead one is found in milliseconds.
        compiled: False for the engine in Python; None for the compiled one where there is a compiler, else a warning.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     group = SharedMemoryGroup(Path(folder), rank=0, size=1)
    >>> tensor = torch.ones(2)
    >>> group.all_reduce(tensor)
    >>> tensor
    tensor([1., 1.])
    >>> group.close()
    """

    def __init__(
        self,
        rendezvous: AbstractRendezvous | Path | str,
        rank: int,
        size: int,
        *,
        timeout: float = 300.0,
        generation: int = 0,
        compiled: bool | None = None,
    ) -> None:
        if not 0 <= rank < size <= MAX_RANKS:
            raise UsageError(f"there is no such rank (rank: {rank}, size: {size}, at most {MAX_RANKS} ranks)")
        if isinstance(rendezvous, (str, Path)):
            rendezvous = FolderRendezvous(Path(rendezvous), generation)
        self._rank, self._size, self._generation, self._timeout = rank, size, generation, timeout
        self._clock = RealClock()
        self._compiled = can_compile() if compiled is None else compiled
        arena_bytes = _arena_bytes()
        layout = native if self._compiled else PythonEngine
        member = Membership(rank, size, generation, int(self._compiled))
        segment = join_segment(rendezvous, member, layout.segment_bytes(size, arena_bytes), timeout)
        self._arena: Arena | None = Arena(
            segment.memory, layout.arena_offset(size, arena_bytes, rank), arena_bytes
        )
        pidfds = _open_pidfds(segment)
        engine = NativeEngine if self._compiled else PythonEngine
        self._engine: AbstractEngine = engine(
            segment.memory, rank, size, arena_bytes=arena_bytes, pidfds=pidfds, timeout=timeout
        )
        self._open: dict[int, SharedMemoryWork] = {}
        self._give_back = weakref.finalize(self, _give_back, self._engine, pidfds)

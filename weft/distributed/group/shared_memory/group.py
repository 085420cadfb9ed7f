"""The shared-memory group: ranks of one host, reduced by compiled kernels, with no copy for tensors of `empty()`."""

import weakref
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import Call
from weft.distributed.group.clock import RealClock
from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.shared_memory.opening import Attachment, attach, can_compile
from weft.distributed.group.shared_memory.rendezvous import AbstractRendezvous, FolderRendezvous
from weft.distributed.group.shared_memory.request import Request, make_recv_any, make_request
from weft.distributed.group.shared_memory.segment import MAX_RANKS, SegmentMember
from weft.distributed.group.shared_memory.splitting import SplitRendezvous, find_members
from weft.distributed.group.shared_memory.work import Owner, SharedMemoryWork, explain
from weft.errors import UsageError

__all__ = ["SharedMemoryGroup"]

MAX_OPEN = 64  # works that go on without their owner before the ended ones among them are let go


@final
class SharedMemoryGroup(AbstractGroup):
    """Ranks of one host through shared memory.

    Args:
        rendezvous: a folder that all ranks can see, or another way to meet.
        rank, size: this rank and the number of ranks.
        timeout: seconds after which a silent peer counts as lost; a dead one is found in milliseconds.
        generation: memberships that came before this one; the same on all ranks.
        compiled: False for the engine in Python; None for the compiled one where there is a compiler, else a warning.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     group = SharedMemoryGroup(folder, rank=0, size=1)
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
        is_compiled = can_compile() if compiled is None else compiled
        super().__init__(rank, size, clock=RealClock(), generation=generation)
        self._member = SegmentMember(rank, size, generation, is_compiled)
        self._timeout = timeout
        self._attachment: Attachment | None = attach(rendezvous, self._member, timeout)
        self._owner = Owner(rank, timeout, {})
        self._shut = weakref.finalize(self, self._attachment.close)  # also when the interpreter ends

    def start(self, call: Call) -> SharedMemoryWork:
        return self._start(make_request(call, self._rank, self._size))

    def _start(self, request: Request) -> SharedMemoryWork:
        attachment = self._attachment
        if attachment is None:
            raise self._closed()
        work = SharedMemoryWork(self._owner, attachment.engine, request)
        if len(self._owner.still_open) > MAX_OPEN:
            self._let_go()
        return work

    def run(self, call: Call) -> None:
        attachment = self._attachment
        if attachment is None:
            raise self._closed()
        request = make_request(call, self._rank, self._size)
        outcome = attachment.engine.run(request)
        if outcome is not None:
            raise explain(outcome, self.rank, self._timeout)
        if request.back is not None and request.target is not None:
            request.back.copy_(request.target)

    def start_recv_any(self, tensor: Tensor, tag: int = 0) -> SharedMemoryWork:
        """Receive from whichever rank sends first under this tag; the work's `source` names it."""
        return self._start(make_recv_any(tensor, tag))

    def split(self, colour: int, key: int) -> "SharedMemoryGroup":
        members = find_members(self, colour, key)
        rank = members.index(self.rank)
        return SharedMemoryGroup(
            SplitRendezvous(self, leader=members[0]),
            rank,
            len(members),
            timeout=self._timeout,
            generation=self.generation,
            compiled=self._member.is_compiled,
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        if self._attachment is None:
            raise self._closed()
        return self._attachment.arena.empty(shape, dtype)

    def close(self) -> None:
        self._attachment = None
        self._shut()
        self._let_go()

    def _closed(self) -> UsageError:
        return UsageError(f"the group is closed (rank: {self.rank}); open a new one")

    def _let_go(self) -> None:
        """Works drop out of `still_open` when they are seen to have ended."""
        for work in list(self._owner.still_open.values()):
            work.is_done()

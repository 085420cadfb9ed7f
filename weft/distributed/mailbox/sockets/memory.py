"""Bodies in shared memory: the sender copies tensors into memory that its peers on this host can read.

    sender:    tensors -> a block of its arena        frame: (meta, loan: number and place) ---->
    receiver:  block -> the tensors it made ready     <---- RELEASE number: the block is free again

A tensor of `empty()` lies in the arena and is lent where it is: one copy less, and it is not free to change until it is
released.

The arena is anonymous memory, opened by peers through /proc as the shared-memory group does: it has no name, so nothing
is left behind whoever is killed when. There is no lock: a block has one writer, and is read only after its frame came.

    | a byte for each life of a peer: 1 when it was given up | blocks ... |

A peer that was given up may only have slept, and read its frames later, when their blocks hold something else. So its
byte is set before they are free, and whoever has copied a block looks at its own byte before it makes use of the copy.
"""

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from weft.distributed.group.shared_memory.arena import Arena
from weft.distributed.group.shared_memory.rendezvous import Invitation, read_start_time
from weft.distributed.mailbox.sockets.frames import RefusedError
from weft.distributed.mailbox.sockets.work import SendWork
from weft.errors import PeerLostError

__all__ = ["MIN_BYTES", "Loan", "SharedBodies", "invite", "map_shared"]

MARKS_BYTES = 2**20  # how many lives can be lent to: a later one gets its bodies through the socket

MIN_BYTES = 2**15
"""Bodies below this go through the socket: a frame back and forth would cost more than the copy."""


def invite(descriptor: int) -> Invitation:
    """How others of this host reach a descriptor of this process."""
    start_time = read_start_time(os.getpid())
    assert start_time is not None, "this process is alive"
    return Invitation(os.getpid(), start_time, descriptor)


def map_shared(descriptor: int, num_bytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0))


class Loan(NamedTuple):
    """A block that a peer may read until it is released."""

    number: int
    place: int
    is_in_place: bool  # the sender's own tensor


@final
class SharedBodies:
    """This peer's arena, what it has lent to whom, and the arenas of the others by incarnation.

    `find` gives the invitation of an incarnation.
    """

    def __init__(self, find: Callable[[int], Invitation | None]) -> None:
        self._find = find
        # As much as the machine has: addresses cost nothing, and pages are taken when they are touched.
        self._num_bytes = num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._descriptor = os.memfd_create("weft-mailbox")
        os.truncate(self._descriptor, num_bytes)
        self._memory = map_shared(self._descriptor, num_bytes)
        self._arena = Arena(self._memory, MARKS_BYTES, num_bytes - MARKS_BYTES)
        self._base = _as_row(self._memory).data_ptr()
        self._lock = threading.Lock()
        self._num_loans = 0
        self._lent: dict[tuple[int, int], tuple[Tensor, SendWork | None]] = {}  # by peer and number
        self._others: dict[int, Tensor] = {}

    @property
    def invitation(self) -> Invitation:
        return invite(self._descriptor)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._arena.empty(shape, dtype)

    def lend(self, to: int, tensors: Sequence[Tensor], work: SendWork) -> Loan | None:
        """Let a peer read tensors, where they are or in a copy; None where it does not pay."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes < MIN_BYTES or to >= MARKS_BYTES:
            return None
        is_in_place = len(tensors) == 1 and 0 <= tensors[0].data_ptr() - self._base < self._num_bytes
        block = tensors[0] if is_in_place else self._copy(tensors, num_bytes)
        with self._lock:
            self._num_loans += 1
            number = self._num_loans
            self._lent[to, number] = (block, work if is_in_place else None)
        return Loan(number, block.data_ptr() - self._base, is_in_place)

    def _copy(self, tensors: Sequence[Tensor], num_bytes: int) -> Tensor:
        block = self._arena.empty((num_bytes,), torch.uint8)
        offset = 0
        for tensor in tensors:
            block[offset : offset + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            offset += tensor.nbytes
        return block

    def take_back(self, peer: int, number: int) -> None:
        with self._lock:
            _, work = self._lent.pop((peer, number), (None, None))
        if work is not None:
            work.end()

    def meet(self, peer: int) -> bool:
        """Open a peer's arena, so that what it has lent outlives it; whether it is still there."""
        invitation = self._find(peer)
        descriptor = invitation.open() if invitation is not None else None
        if descriptor is None:
            return False
        try:
            self._others[peer] = _as_row(map_shared(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)
        return True

    def borrow(self, peer: int, place: int, num_bytes: int) -> Tensor:
        """What a peer has lent, to be read before it is released."""
        row = self._others[peer][place : place + num_bytes]
        if row.nbytes != num_bytes:
            raise RefusedError("malformed")
        return row

    def is_given_up(self, peer: int, me: int) -> bool:
        """Whether a peer has taken back what it had lent to this life: what was borrowed may be something else."""
        return me < MARKS_BYTES and bool(self._others[peer][me])

    def forget(self, peer: int, error: PeerLostError, *, is_last: bool = False) -> None:
        """The peer has gone: what it was lent comes back, and its memory is let go.

        At the very last, when nothing is written to the arena any more, copies stay lent: slow peers read them yet.
        """
        with self._lock:
            keys = [key for key, (_, work) in self._lent.items() if key[0] == peer and not (is_last and work is None)]
            if keys:
                self._memory[peer] = 1  # before anything is free to be changed
            lent = {key: self._lent.pop(key) for key in keys}
        for _, work in lent.values():
            if work is not None:
                work.end(error)
        self._others.pop(peer, None)

    def close(self) -> None:
        """What is still lent stays so: freed, it could be given out by `empty` and written to."""
        self._others.clear()
        os.close(self._descriptor)


def _as_row(memory: mmap.mmap) -> Tensor:
    """The memory as bytes; it stays mapped for as long as anything views it."""
    return torch.from_numpy(np.frombuffer(memory, np.uint8))

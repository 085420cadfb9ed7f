"""Bodies of messages in shared memory: the sender copies tensors into memory that its peers on this host can read.

    sender:    tensors -> a block of its arena       frame: (meta, number and offset of the block) ---->
    receiver:  block -> the tensors to receive into  <---- RELEASE number: the block is free again

A tensor of `empty()` is in the arena already and is shared where it is: one copy less, and it may not be changed until
it is released.

The arena is anonymous memory, opened by peers through /proc as the shared-memory group does: it has no name, so nothing
is left behind whoever is killed when. There is no lock: a block has one writer, and is read only after its frame came.

    | a byte for each incarnation of a peer: 1 when its blocks were revoked | blocks ... |

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
from weft.distributed.mailbox.endpoint import SendWork
from weft.distributed.mailbox.sockets.frames import RefusedError
from weft.errors import PeerLostError

__all__ = ["SharedBlock", "SharedBodies"]

MAX_PEERS = 2**20  # a peer with a later incarnation gets its bodies through the socket
MIN_BYTES = 2**15  # smaller bodies go through the socket: a frame back and forth would cost more than the copy


class SharedBlock(NamedTuple):
    """A block that a peer may read until it is released."""

    number: int
    offset: int
    is_in_place: bool  # the sender's own tensor


@final
class SharedBodies:
    """This peer's arena, which blocks of it others may read, and the arenas of others. Peers go by incarnation.

    `find_invitation` gives that of an incarnation.
    """

    def __init__(self, find_invitation: Callable[[int], Invitation | None]) -> None:
        self._find_invitation = find_invitation
        # As much as the machine has: addresses cost nothing, and pages are taken when they are touched.
        num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._descriptor = os.memfd_create("weft-mailbox")
        os.truncate(self._descriptor, num_bytes)
        self._mapping = _map_shared(self._descriptor)
        self._arena = Arena(self._mapping, MAX_PEERS, num_bytes - MAX_PEERS)
        self._bytes = _view_mapping(self._mapping)
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._shared: dict[tuple[int, int], tuple[Tensor, SendWork | None]] = {}  # by peer and number
        self._attached: dict[int, Tensor] = {}

    @property
    def invitation(self) -> Invitation:
        """How others of this host reach the arena."""
        start_time = read_start_time(os.getpid())
        assert start_time is not None, "this process is alive"
        return Invitation(os.getpid(), start_time, self._descriptor)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._arena.empty(shape, dtype)

    def share(self, peer: int, tensors: Sequence[Tensor], work: SendWork) -> SharedBlock | None:
        """Let a peer read tensors, where they are or in a copy; None where it does not pay."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes < MIN_BYTES or peer >= MAX_PEERS:
            return None
        base = self._bytes.data_ptr()
        is_in_place = len(tensors) == 1 and 0 <= tensors[0].data_ptr() - base < self._bytes.nbytes
        block = tensors[0] if is_in_place else self._copy(tensors, num_bytes)
        with self._lock:
            self._num_blocks += 1
            number = self._num_blocks
            self._shared[peer, number] = (block, work if is_in_place else None)
        return SharedBlock(number, block.data_ptr() - base, is_in_place)

    def _copy(self, tensors: Sequence[Tensor], num_bytes: int) -> Tensor:
        block = self._arena.empty((num_bytes,), torch.uint8)
        offset = 0
        for tensor in tensors:
            block[offset : offset + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            offset += tensor.nbytes
        return block

    def release(self, peer: int, number: int) -> None:
        """A block was read, or its frame was not sent: it is free again."""
        with self._lock:
            _, work = self._shared.pop((peer, number), (None, None))
        if work is not None:
            work.end()

    def attach(self, peer: int) -> bool:
        """Open a peer's arena, so that its blocks outlive it; whether it is still there."""
        invitation = self._find_invitation(peer)
        descriptor = invitation.open() if invitation is not None else None
        if descriptor is None:
            return False
        try:
            self._attached[peer] = _view_mapping(_map_shared(descriptor))
        finally:
            os.close(descriptor)
        return True

    def read(self, peer: int, offset: int, num_bytes: int) -> Tensor:
        """The bytes of a peer's block, to be copied before it is released."""
        block = self._attached[peer][offset : offset + num_bytes]
        if block.nbytes != num_bytes:
            raise RefusedError("malformed")
        return block

    def is_revoked(self, peer: int, me: int) -> bool:
        """Whether a peer has taken its blocks back from this incarnation: what was read may be something else."""
        return me < MAX_PEERS and bool(self._attached[peer][me])

    def detach(self, peer: int, error: PeerLostError, *, is_last: bool = False) -> None:
        """The peer has gone: the blocks that it could read are free again, and its arena is closed.

        At the very last, when nothing is written to the arena any more, copies stay shared: slow peers read them yet.
        """
        with self._lock:
            keys = [key for key, (_, work) in self._shared.items() if key[0] == peer and not (is_last and work is None)]
            if keys:
                self._mapping[peer] = 1  # before anything is free to be changed
            revoked = [self._shared.pop(key) for key in keys]
        for _, work in revoked:
            if work is not None:
                work.end(error)
        self._attached.pop(peer, None)

    def close(self) -> None:
        """Blocks that are shared stay so: freed, they could be given out by `empty` and written to."""
        self._attached.clear()
        os.close(self._descriptor)


def _map_shared(descriptor: int) -> mmap.mmap:
    num_bytes = os.fstat(descriptor).st_size
    return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0))


def _view_mapping(mapping: mmap.mmap) -> Tensor:
    """The mapping as bytes; it stays mapped for as long as anything views it."""
    return torch.from_numpy(np.frombuffer(mapping, np.uint8))

"""The memory that the ranks of one group share, and the roll at its head in which each of them registers.

| roll: magic, size, generation, compiled | rank 0: pid, start time | rank 1: ... | what the engine lays out |
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import NamedTuple

from weft.distributed.group.shared_memory.rendezvous import (
    POLL_SECONDS,
    AbstractRendezvous,
    Invitation,
    read_start_time,
)
from weft.errors import PeerLostError, UsageError

__all__ = ["MAX_RANKS", "ROLL_BYTES", "Entry", "Segment", "SegmentMember", "join_segment"]

ROLL_BYTES = 65536  # matches segment.h
ENTRY_BYTES = 64
MAX_RANKS = ROLL_BYTES // ENTRY_BYTES - 1
MAGIC = b"weft-shm"
_TITLE = struct.Struct("<8s2Q?")
_ENTRY = struct.Struct("<2Q48s")
_MAX_CORES = 48 * 8  # more are not told apart


@dataclass(frozen=True, slots=True)
class SegmentMember:
    """A rank that joins a segment: the same on all ranks but for `rank`. The two engines lay memory out differently."""

    rank: int
    size: int
    generation: int
    is_compiled: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Mapped memory with all ranks present. The mapping lives as long as anything that views it."""

    memory: mmap.mmap
    entries: tuple["Entry", ...]

    @property
    def num_cores(self) -> int:
        """Cores that the ranks may use together."""
        cores = 0
        for entry in self.entries:
            cores |= entry.cores
        return cores.bit_count()


class Entry(NamedTuple):
    """The registration of a rank; all zeros until then. `cores` has a bit for each core it may run on."""

    pid: int
    start_time: int
    cores: int


def join_segment(rendezvous: AbstractRendezvous, member: SegmentMember, num_bytes: int, timeout: float) -> Segment:
    """Make the segment (rank 0) or open it, register, and return when all ranks have."""
    deadline = time.monotonic() + timeout
    if member.rank != 0:
        return _wait_for_all(_enter(rendezvous, member, num_bytes, deadline), member, deadline)
    descriptor = os.memfd_create("weft")
    try:
        os.truncate(descriptor, num_bytes)
        memory = _map(descriptor, num_bytes)
        _TITLE.pack_into(memory, 0, MAGIC, member.size, member.generation, member.is_compiled)
        _register(memory, 0)
        rendezvous.publish(Invitation(os.getpid(), _own_start_time(), descriptor))
        try:
            return _wait_for_all(memory, member, deadline)
        finally:
            rendezvous.withdraw()
    finally:
        os.close(descriptor)


def _enter(rendezvous: AbstractRendezvous, member: SegmentMember, num_bytes: int, deadline: float) -> mmap.mmap:
    """Open what rank 0 offers, passing over an invitation that an earlier, dead rank 0 left."""
    while True:
        invitation = rendezvous.fetch(deadline)
        descriptor = invitation.open() if invitation is not None else None
        if descriptor is not None:
            try:
                _check_bytes(descriptor, num_bytes)
                memory = _map(descriptor, num_bytes)
            finally:
                os.close(descriptor)
            _check_title(memory, member)
            _register(memory, member.rank)
            return memory
        if time.monotonic() > deadline:
            raise PeerLostError("rank 0 did not open the group in time; start it, or give a longer timeout", 0)
        time.sleep(POLL_SECONDS)


def _wait_for_all(memory: mmap.mmap, member: SegmentMember, deadline: float) -> Segment:
    while True:
        entries = tuple(_entry(memory, rank) for rank in range(member.size))
        missing = [rank for rank, entry in enumerate(entries) if not entry.pid]
        if not missing:
            return Segment(memory, entries)
        for rank, entry in enumerate(entries):
            if entry.pid and read_start_time(entry.pid) != entry.start_time:
                raise PeerLostError(f"rank {rank} died while the group was opened; look at its output", rank)
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"ranks did not join the group in time (missing: {missing}); start them, or give a longer timeout",
                missing[0],
            )
        time.sleep(POLL_SECONDS)


def _map(descriptor: int, num_bytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0))


def _check_bytes(descriptor: int, num_bytes: int) -> None:
    found = os.fstat(descriptor).st_size
    if found != num_bytes:
        raise UsageError(
            f"ranks disagree on the group's memory (bytes of rank 0: {found}, here: {num_bytes}); "
            "give the same size and the same compiler setting to all"
        )


def _check_title(memory: mmap.mmap, member: SegmentMember) -> None:
    magic, size, generation, is_compiled = _TITLE.unpack_from(memory, 0)
    if (magic, size, generation, is_compiled) != (MAGIC, member.size, member.generation, member.is_compiled):
        raise UsageError(
            f"ranks disagree on the group (rank 0: size {size}, generation {generation}, compiled {is_compiled}; "
            f"here: {member.size}, {member.generation}, {member.is_compiled}); give the same to all"
        )


def _register(memory: mmap.mmap, rank: int) -> None:
    at = ENTRY_BYTES * (1 + rank)
    if _entry(memory, rank).pid:
        raise UsageError(f"rank {rank} has joined this group already; give each process a rank of its own")
    cores = sum(1 << core for core in os.sched_getaffinity(0) if core < _MAX_CORES)
    _ENTRY.pack_into(memory, at, 0, _own_start_time(), cores.to_bytes(_MAX_CORES // 8, "little"))
    struct.pack_into("<Q", memory, at, os.getpid())  # last: it says that the entry is whole


def _entry(memory: mmap.mmap, rank: int) -> Entry:
    pid, start_time, cores = _ENTRY.unpack_from(memory, ENTRY_BYTES * (1 + rank))
    return Entry(pid, start_time, int.from_bytes(cores, "little"))


def _own_start_time() -> int:
    start_time = read_start_time(os.getpid())
    assert start_time is not None, "this process is alive"
    return start_time

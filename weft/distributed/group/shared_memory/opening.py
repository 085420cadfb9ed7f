"""Joins a segment and starts an engine over it: the processes of the peers, the arena."""

import os
import warnings
from contextlib import ExitStack
from dataclasses import dataclass

from weft.distributed.group.shared_memory import native, python_engine
from weft.distributed.group.shared_memory.arena import Arena
from weft.distributed.group.shared_memory.engine import AbstractTransferEngine, EngineConfig
from weft.distributed.group.shared_memory.rendezvous import AbstractRendezvous, read_start_time
from weft.distributed.group.shared_memory.segment import Segment, SegmentMember, join_segment
from weft.errors import CompilerError, PeerLostError

__all__ = ["Attachment", "attach", "can_compile"]


@dataclass(frozen=True, slots=True)
class Attachment:
    """An engine over a segment that this rank has joined, and the tensors in it."""

    engine: AbstractTransferEngine
    arena: Arena
    pidfds: tuple[int, ...]

    def close(self) -> None:
        self.engine.close()
        for descriptor in self.pidfds:
            os.close(descriptor)


def can_compile() -> bool:
    """Whether the compiled engine can be had; a warning says why not."""
    try:
        native.load_library()
    except CompilerError as error:
        warnings.warn(f"shared memory runs in Python, at a small part of its speed: {error}", stacklevel=3)
        return False
    return True


def attach(rendezvous: AbstractRendezvous, member: SegmentMember, timeout: float) -> Attachment:
    layout = native if member.is_compiled else python_engine
    arena_bytes = _arena_bytes()
    segment = join_segment(rendezvous, member, layout.segment_bytes(member.size, arena_bytes), timeout)
    offset = layout.arena_offset(member.size, arena_bytes, member.rank)
    spare = segment.num_cores - member.size
    make_engine = native.NativeEngine if member.is_compiled else python_engine.PythonEngine
    with ExitStack() as undo:
        pidfds = _open_pidfds(segment, undo)
        config = EngineConfig(
            member.rank, member.size, arena_bytes, pidfds, timeout, may_spin=spare >= 0, may_overlap=spare > 0
        )
        attachment = Attachment(make_engine(segment.memory, config), Arena(segment.memory, offset, arena_bytes), pidfds)
        undo.pop_all()
    return attachment


def _arena_bytes() -> int:
    """As much as the machine has: addresses cost nothing, and pages are taken when they are touched."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _open_pidfds(segment: Segment, undo: ExitStack) -> tuple[int, ...]:
    """One descriptor per rank that tells when its process ends, whoever gets its number later. `undo` closes them."""
    pidfds: list[int] = []
    for rank, entry in enumerate(segment.entries):
        try:
            pidfds.append(os.pidfd_open(entry.pid))
            undo.callback(os.close, pidfds[-1])
            lives = read_start_time(entry.pid) == entry.start_time
        except ProcessLookupError:
            lives = False
        if not lives:
            raise PeerLostError(f"rank {rank} died while the group was opened; look at its output", rank)
    return tuple(pidfds)

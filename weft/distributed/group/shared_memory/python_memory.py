"""The shared segment as the engine in Python lays it out: counters, staging buffers, packets, arenas.

    | counters | two staging buffers of each rank | one packet per pair of ranks | arenas |

A counter has one writer. It is raised when what it speaks of is written, so whoever reads it may read that too.
"""

import mmap
import threading
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from weft.distributed.group.shared_memory.engine import Outcome, Reason
from weft.distributed.group.shared_memory.segment import ROLL_BYTES

__all__ = ["PACKET_BYTES", "PACKET_HEAD", "STAGE_BYTES", "Counters", "Layout", "PythonMemory"]

STAGE_BYTES = 2**20
PACKET_BYTES = 2**17
PACKET_HEAD = 64  # tag, bytes of the message

Counters = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in the segment."""

    size: int

    @property
    def num_counters(self) -> int:
        return 1 + 5 * self.size + 2 * self.size**2

    @property
    def stages(self) -> int:
        return ROLL_BYTES + -(-self.num_counters * 8 // 4096) * 4096

    @property
    def packets(self) -> int:
        return self.stages + self.size * 2 * STAGE_BYTES

    @property
    def arenas(self) -> int:
        return self.packets + self.size**2 * (PACKET_HEAD + PACKET_BYTES)


@final
class PythonMemory:
    """Views of the segment: of each rank `posted`, `taken`, `left` and two `signatures`, of each pair `sent` and
    `received`; `stages` by rank and slot, `packets` by sender and receiver."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        layout = Layout(size)
        counters = np.frombuffer(memory, np.int64, layout.num_counters, ROLL_BYTES)
        self._failure = counters[:1]
        self.posted, self.taken, self.left, *self.signatures = counters[1 : 1 + 5 * size].reshape(5, size)
        self.sent, self.received = counters[1 + 5 * size :].reshape(2, size, size)
        data = torch.from_numpy(np.frombuffer(memory, np.uint8, layout.arenas - layout.stages, layout.stages))
        stages, packets = data.split([size * 2 * STAGE_BYTES, layout.arenas - layout.packets])
        self.stages = stages.view(size, 2, STAGE_BYTES)
        self.packets = packets.view(size, size, PACKET_HEAD + PACKET_BYTES)
        self.rank, self.size = rank, size
        self._lock = threading.Lock()

    @property
    def num_steps(self) -> int:
        """How often this rank has raised a counter."""
        messages = self.sent[self.rank].sum() + self.received[:, self.rank].sum()
        return int(self.posted[self.rank] + self.taken[self.rank] + messages)

    @property
    def failure(self) -> Outcome | None:
        """The failure that ends the group, once a rank has met one."""
        code = int(self._failure[0])
        return Outcome(Reason(code >> 32), code & 0xFFFFFFFF) if code else None

    def fail(self, reason: Reason, peer: int) -> None:
        """End the group for all ranks; the first failure is the one that counts."""
        if not self._failure[0]:
            self._failure[0] = reason << 32 | peer

    def publish(self, counters: Counters, index: int, value: int) -> None:
        """Raise a counter after what was written before: taking a lock is a barrier for the processor."""
        with self._lock:
            counters[index] = value

    def reaches(self, counters: Counters, index: int, value: int) -> bool:
        with self._lock:
            return bool(counters[index] >= value)

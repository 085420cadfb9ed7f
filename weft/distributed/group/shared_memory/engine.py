"""The engine carries requests out: compiled, or in Python where there is no compiler."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

from weft.distributed.group.shared_memory.request import Request

__all__ = ["AbstractTransferEngine", "EngineConfig", "Outcome", "Reason", "Timing"]


class Reason(IntEnum):
    """Why a call failed. The numbers are those of collectives.h."""

    NONE = 0
    DIED = 1
    SILENT = 2
    LEFT = 3
    MISMATCH = 4
    CLOSED = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended; `peer` is the rank that is the cause of a failure."""

    reason: Reason
    peer: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Moments of one call in nanoseconds of the monotonic clock: given to the engine, begun, ended.

    `waited` is how long callers were held up in `wait` (ns): the exposed part. The rest of `ended - begun` was hidden.
    """

    queued: int
    begun: int
    ended: int
    waited: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's rank, its peers, and how it may wait.

    `pidfds` are descriptors of all ranks' processes, in rank order. Where each rank has a core, a waiting one may spin;
    where there are more cores, calls may run beside the computation.
    """

    rank: int
    size: int
    arena_bytes: int
    pidfds: tuple[int, ...]
    timeout: float  # seconds
    may_spin: bool
    may_overlap: bool


class AbstractTransferEngine(ABC):
    """Requests in, by handle. A handle is valid until it is forgotten, also after `close`."""

    @abstractmethod
    def start(self, request: Request) -> int: ...

    @abstractmethod
    def run(self, request: Request) -> Outcome | None:
        """Start and wait, without a handle."""

    @abstractmethod
    def wait(self, handle: int) -> Outcome | None:
        """Return when the call has ended; None says that it ended well."""

    @abstractmethod
    def is_done(self, handle: int) -> bool: ...

    @abstractmethod
    def timing(self, handle: int) -> Timing: ...

    @abstractmethod
    def source(self, handle: int) -> int:
        """The rank that a receive took its message from, once it is done."""

    @abstractmethod
    def forget(self, handle: int) -> None:
        """Give a handle back whose call is done."""

    @abstractmethod
    def close(self) -> None:
        """End all that is open, and what is started later, with Reason.CLOSED. Other threads may be waiting."""

"""A call of the shared-memory group under way."""

from dataclasses import dataclass
from typing import final

from weft.distributed.group.group import AbstractWork
from weft.distributed.group.shared_memory.engine import AbstractTransferEngine, Outcome, Reason, Timing
from weft.distributed.group.shared_memory.request import Request
from weft.errors import OutOfStepError, PeerLostError, UsageError

__all__ = ["Owner", "SharedMemoryWork", "explain"]


@dataclass(frozen=True, slots=True)
class Owner:
    """Shared by the works of one group; `still_open` holds those that their callers may have dropped."""

    rank: int
    timeout: float  # seconds
    still_open: "dict[int, SharedMemoryWork]"


@final
class SharedMemoryWork(AbstractWork):
    """Holds its tensors until the call has ended."""

    __slots__ = ("_engine", "_handle", "_has_ended", "_outcome", "_owner", "_request")

    def __init__(self, owner: "Owner", engine: AbstractTransferEngine, request: Request) -> None:
        self._owner = owner
        self._engine = engine
        self._request: Request | None = request
        self._outcome: Outcome | None = None
        self._has_ended = False
        self._handle = engine.start(request)
        owner.still_open[self._handle] = self

    def __del__(self) -> None:
        if self._has_ended:  # otherwise the constructor failed
            self._engine.forget(self._handle)

    def wait(self) -> None:
        if not self._has_ended:
            self._settle(self._engine.wait(self._handle))
        if self._outcome is not None:
            raise explain(self._outcome, self._owner.rank, self._owner.timeout)

    def is_done(self) -> bool:
        if not self._has_ended and self._engine.is_done(self._handle):
            self._settle(self._engine.wait(self._handle))
        return self._has_ended

    @property
    def timing(self) -> Timing:
        """When it was queued, begun and ended, and how long callers waited; once it is done."""
        return self._engine.timing(self._handle)

    @property
    def source(self) -> int:
        """Of a receive: the rank that the message came from; once it is done."""
        return self._engine.source(self._handle)

    def _settle(self, outcome: Outcome | None) -> None:
        request, self._request = self._request, None
        if self._has_ended or request is None:  # another thread came first
            return
        self._outcome = outcome
        if outcome is None and request.back is not None and request.target is not None:
            request.back.copy_(request.target)
        self._has_ended = True
        self._owner.still_open.pop(self._handle, None)


def explain(outcome: Outcome, rank: int, timeout: float) -> Exception:
    """The error for a failed call, as the rank that made it sees it."""
    peer = outcome.peer
    match outcome.reason:
        case Reason.DIED if peer == rank:
            return PeerLostError(f"a call of this rank broke off (rank: {rank}); look at the error before it", peer)
        case Reason.DIED:
            return PeerLostError(f"rank {peer} died (seen by rank {rank}); look at its output", peer)
        case Reason.LEFT:
            return PeerLostError(
                f"rank {peer} closed the group while rank {rank} waited for it; make all ranks start the same calls",
                peer,
            )
        case Reason.SILENT if peer == rank:
            return PeerLostError(
                f"this rank was given up by its peers (rank: {rank}, silent for: {timeout:g} s); give a longer timeout",
                peer,
            )
        case Reason.SILENT:
            return PeerLostError(
                f"rank {peer} was silent for longer than the timeout (seen by rank {rank}, timeout: {timeout:g} s); "
                "look at what it does, or give a longer timeout",
                peer,
            )
        case Reason.MISMATCH:
            other = "found by a peer" if peer == rank else f"other rank: {peer}"
            return OutOfStepError(
                f"ranks started calls that do not match (rank: {rank}, {other}); "
                "make all ranks start the same calls, with the same sizes and types"
            )
        case _:
            return UsageError(f"the group was closed while a call was under way (rank: {rank}); wait for it before")

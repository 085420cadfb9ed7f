"""The peers of a mailbox: who is there, who has gone, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from weft.errors import PeerLostError

__all__ = ["Departure", "Roster", "lost_peer"]


@dataclass(frozen=True, slots=True)
class Departure:
    """Why a peer has gone, and when its last message arrives at each other one, where messages take virtual time."""

    reason: str
    last_arrivals: Mapping[int, float] = field(default_factory=dict)


@final
class Roster:
    """Who is there and who has gone, by address. Of one receiver, or of all at once where time is virtual."""

    def __init__(self) -> None:
        self.present: dict[int, int] = {}  # incarnation
        self.latest: dict[int, int] = {}  # incarnation, also of those who have gone
        self.gone: dict[int, Departure] = {}
        self.num_joined = 0

    def join(self, peer: int, incarnation: int) -> None:
        self.present[peer] = self.latest[peer] = incarnation
        self.gone.pop(peer, None)
        self.num_joined += 1

    def leave(self, peer: int, departure: Departure) -> None:
        del self.present[peer]
        self.gone[peer] = departure

    def explain_absence(self, peer: int) -> PeerLostError:
        """The error for a send to a peer that is not there."""
        return lost_peer(peer, self.gone[peer].reason if peer in self.gone else None)


def lost_peer(peer: int, reason: str | None) -> PeerLostError:
    """The error for a peer that has gone for this reason, or, without one, has never been there."""
    if reason is None:
        return PeerLostError(f"peer has not joined (peer: {peer}); start it, or wait for it with await_peers", peer)
    return PeerLostError(f"peer {peer} is lost (peer: {peer}, reason: {reason}); go on without it", peer)

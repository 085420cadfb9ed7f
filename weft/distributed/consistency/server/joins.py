"""Which of the pushes that wait at a host server are joined: all, or, in a replay, those that were."""

from collections.abc import Collection, Iterable
from typing import final

from weft.distributed.consistency.server.decisions import Commit, Decision, Push

__all__ = ["Joins"]


@final
class Joins:
    """Args:
    recorded: what the host server decided before; None to decide anew.
    """

    def __init__(self, recorded: Iterable[Decision] | None = None) -> None:
        is_replayed = recorded is not None
        self._left = [d.pushes for d in recorded or () if isinstance(d, Commit)][::-1] if is_replayed else None

    def choose(self, waiting: Collection[Push]) -> tuple[Push, ...]:
        """The next to set out, of those that wait, in the order of their arrival; none where nothing may."""
        if not self._left:  # after what is repeated, too: shards stop those who ask then
            return tuple(waiting)
        if set(self._left[-1]) <= set(waiting):
            return self._left.pop()
        return ()

    def dismiss(self, waiting: Collection[Push]) -> tuple[Push, ...]:
        """Pushes of ranks that had no further part in what is repeated."""
        if not self._left:
            return ()
        needed = {rank for pushes in self._left for rank, _ in pushes}
        return tuple(push for push in waiting if push[0] not in needed)

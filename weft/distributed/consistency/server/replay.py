"""Policies that decide what was decided before: the order in a journal, whatever the order of arrival now."""

from collections.abc import Collection, Iterable, Sequence
from typing import final

from weft.distributed.consistency.server.decisions import Commit, Decision, Drop, Join, Leave, Push, Release
from weft.distributed.consistency.server.policy import NEVER, AbstractPolicy

__all__ = ["JoinPolicy", "ReplayPolicy"]


@final
class ReplayPolicy(AbstractPolicy):
    """Takes up each recorded decision as soon as what it needs is here. After the last, ranks that ask are stopped."""

    def __init__(self, decisions: Iterable[Decision]) -> None:
        self._left = list(reversed(list(decisions)))
        self._pushed: set[Push] = set()
        self._waiting: dict[int, int] = {}
        self._gone: set[int] = set()

    @property
    def num_left(self) -> int:
        """Decisions that were not taken up."""
        return len(self._left)

    def arrive(self, rank: int, step: int | None, now: float) -> Sequence[Decision]:
        self._waiting[rank] = step or 0
        return self._move_on()

    def push(self, rank: int, step: int, now: float, others: Sequence[Push] = ()) -> Sequence[Decision]:
        for pusher, its_step in ((rank, step), *others):
            self._pushed.add((pusher, its_step))
            self._waiting[pusher] = its_step + 1
        return self._move_on()

    def leave(self, rank: int, now: float) -> Sequence[Decision]:
        """As recorded, not as it happens."""
        return []

    def stop(self) -> Sequence[Decision]:
        """As recorded, not as it is wished."""
        return []

    def alarm(self) -> float:
        return NEVER

    def ring(self, now: float) -> Sequence[Decision]:
        return []

    def _move_on(self) -> list[Decision]:
        decisions: list[Decision] = []
        while self._left and self._is_possible(self._left[-1]):
            decision = self._left.pop()
            match decision:
                case Commit(pushes):
                    self._pushed -= set(pushes)
                case Drop(rank, step):
                    self._pushed.discard((rank, step))
                case Release(rank):
                    del self._waiting[rank]
                case Leave(rank):
                    self._gone.add(rank)
            decisions.append(decision)
        ended = [rank for rank in self._waiting if not self._left or rank in self._gone]
        return [*decisions, *(Release(rank, self._waiting.pop(rank), stop=True) for rank in ended)]

    def _is_possible(self, decision: Decision) -> bool:
        match decision:
            case Commit(pushes):
                return self._pushed >= set(pushes)
            case Drop(rank, step):
                return (rank, step) in self._pushed
            case Release(rank):
                return rank in self._waiting
            case Leave() | Join():
                return True


@final
class JoinPolicy:
    """Which of the pushes that wait at a host server are joined: all, or, in a replay, those that were.

    Args:
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

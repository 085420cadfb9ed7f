"""How long an all-reduce takes on a modelled network: its schedules played over the links, without tensors.

Formulas for levels, for lines that ranks share and for rounds that overtake each other would be many, and each an
approximation. The schedules are data, and the network says when its links are free: so the forecast is what the virtual
cluster does, message by message.

    rank 0   [send .. recv][reduce][send .. recv]      a round begins when the one before is over and reduced,
    rank 1   [send ...... recv][reduce][send .. ]      and messages take the links in the order of their moments
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import final

from weft.distributed.collectives.moves import Action, Schedule
from weft.planning.network import LinkSchedule, NetworkModel

__all__ = ["AllReduceSchedule", "forecast"]


@dataclass(frozen=True)
class AllReduceSchedule:
    """The schedule of one rank, and the number of parts that it cuts a message into.

    Of an all-reduce that collects first and reduces then, `collected` is the number of rounds after which the rank
    reduces its own part of everyone.
    """

    schedule: Schedule
    num_parts: int
    collected: int | None = None


def forecast(
    schedules: Sequence[AllReduceSchedule],
    bounds: Sequence[int],
    network: NetworkModel,
    ranks: Sequence[int],
    limit: float = math.inf,
) -> float:
    """Seconds until the last rank is done, all having begun at once; infinity where that is later than `limit`.

    Args:
        schedules: of every rank.
        bounds: where the parts of the message begin and end, in bytes.
        ranks: the places of the ranks in the network.
    """
    return _Play(schedules, bounds, network, ranks).run(limit)


@final
class _Play:
    """All ranks, each in a round of its own."""

    def __init__(
        self, schedules: Sequence[AllReduceSchedule], bounds: Sequence[int], network: NetworkModel, ranks: Sequence[int]
    ) -> None:
        self._schedules = schedules
        self._bounds = bounds
        self._ranks = ranks
        self._gamma = network.gamma
        self._links = LinkSchedule(network, max(ranks) + 1)
        size = len(ranks)
        self._round = [0] * size
        self._ends = [0.0] * size
        self._reduced = [0] * size
        self._num_awaited = [0] * size
        # By (sender, receiver): when messages arrive that nobody has asked for, and how many are asked for.
        self._arrivals: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        self._asked: dict[tuple[int, int], int] = defaultdict(int)
        self._ready = sorted((0.0, rank, place) for place, rank in enumerate(ranks))

    def run(self, limit: float) -> float:
        last = 0.0
        while self._ready:
            moment, _, place = heappop(self._ready)
            if moment > limit:
                return math.inf
            if not self._begin_round(place, moment):
                last = max(last, moment)
        return last

    def _begin_round(self, place: int, moment: float) -> bool:
        """Start the next round that has messages; False where there is none."""
        rounds, bounds = self._schedules[place].schedule, self._bounds
        before, has_messages = self._round[place], False
        self._ends[place] = moment
        while self._round[place] < len(rounds) and not has_messages:
            for move in rounds[self._round[place]]:
                num_bytes = bounds[move.parts[1]] - bounds[move.parts[0]]
                if num_bytes == 0:
                    continue
                has_messages = True
                if move.action is Action.SEND:
                    self._send(place, move.peer, num_bytes, moment)
                    continue
                self._receive(move.peer, place)
                if move.action is Action.REDUCE:
                    self._reduced[place] += num_bytes
            self._round[place] += 1
        collected = self._schedules[place].collected
        if collected is not None and before < collected <= self._round[place]:
            self._reduced[place] += (len(self._ranks) - 1) * (bounds[place + 1] - bounds[place])
        if has_messages and self._num_awaited[place] == 0:
            self._end_round(place)
        return has_messages

    def _send(self, place: int, peer: int, num_bytes: int, moment: float) -> None:
        sent, received = self._links.transfer(self._ranks[place], self._ranks[peer], num_bytes, moment)
        self._ends[place] = max(self._ends[place], sent)
        if not self._asked[place, peer]:
            self._arrivals[place, peer].append(received)
            return
        self._asked[place, peer] -= 1
        self._ends[peer] = max(self._ends[peer], received)
        self._num_awaited[peer] -= 1
        if self._num_awaited[peer] == 0:
            self._end_round(peer)

    def _receive(self, peer: int, place: int) -> None:
        arrivals = self._arrivals[peer, place]
        if arrivals:
            self._ends[place] = max(self._ends[place], arrivals.popleft())
        else:
            self._asked[peer, place] += 1
            self._num_awaited[place] += 1

    def _end_round(self, place: int) -> None:
        moment = self._ends[place] + self._reduced[place] * self._gamma
        self._reduced[place] = 0
        heappush(self._ready, (moment, self._ranks[place], place))

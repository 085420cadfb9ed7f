"""Schedules as data: which parts of a message a rank sends and receives, round by round.

A message is cut into numbered parts, of nearly equal length unless the call gives their sizes. A schedule says nothing
of lengths or types, so one serves every message. All moves of a round are started together and awaited together; the
matching moves of two ranks stand in the same round of both schedules, so no order of sends and receives can block.
"""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

__all__ = ["Action", "Move", "Parts", "Schedule", "all_parts", "part_bounds"]


class Action(Enum):
    """The kinds of moves of parts: send them, receive over them, or receive and reduce into them."""

    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"


Parts = tuple[int, int]
"""Parts first to last, last excluded."""


@dataclass(frozen=True, slots=True)
class Move:
    action: Action
    peer: int
    parts: Parts


Schedule = tuple[tuple[Move, ...], ...]
"""Rounds of moves, of one rank."""


def all_parts(num_parts: int) -> list[Parts]:
    """Each part by itself.

    >>> all_parts(3)
    [(0, 1), (1, 2), (2, 3)]
    """
    return [(part, part + 1) for part in range(num_parts)]


@lru_cache(64)
def part_bounds(length: int, num_parts: int) -> tuple[int, ...]:
    """Where the parts begin and end: the first ones are longer by one element where it does not divide.

    >>> part_bounds(10, 4)
    (0, 3, 6, 8, 10)
    """
    short, longer = divmod(length, num_parts)
    return tuple(part * short + min(part, longer) for part in range(num_parts + 1))

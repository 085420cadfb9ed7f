"""What ranks that gossip over the mailbox say to each other.

worker of rank a                desk of rank p                      desk of rank 0, which keeps the books
ask    turn, its weights   -->
                           <--  paired   the mean of the two
look   rank 0 evaluates    -->
                           <--  view     a copy of the weights
free   its own: go on      -->
                           <--  go       its own: your update is next (a replay)
deal   wants work          ----------------------------------->
                           <-----------------------------------     work    which piece, whether to stop
begin, stop, sum           ----------------------------------->
                           <-----------------------------------     total   when all who are left have given theirs
start    weights of rank 0, from worker to worker
weights  turn, a neighbour's, from worker to worker, where a rank meets all; none from one that has left
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

__all__ = ["Letter", "Tag", "desk_address"]


class Tag(StrEnum):
    """What a message is about."""

    START = "start"
    WEIGHTS = "weights"
    ASK = "ask"
    PAIRED = "paired"
    LOOK = "look"
    VIEW = "view"
    FREE = "free"
    GO = "go"
    BEGIN = "begin"
    DEAL = "deal"
    WORK = "work"
    STOP = "stop"
    SUM = "sum"
    TOTAL = "total"


@dataclass(frozen=True, eq=False)
class Letter:
    """A message that is to be sent."""

    to: int
    tag: Tag
    header: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


def desk_address(size: int, rank: int) -> int:
    """Workers have the addresses of their ranks; desks come after them."""
    return size + rank

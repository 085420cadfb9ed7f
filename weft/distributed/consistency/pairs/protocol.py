"""What ranks that gossip over the mailbox say to each other.

worker of rank a                responder of rank p                 responder of rank 0, which coordinates
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

from enum import StrEnum

from weft.distributed.consistency.control import STOP, SUM, TOTAL

__all__ = ["Tag", "responder_address"]


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
    STOP = STOP
    SUM = SUM
    TOTAL = TOTAL


def responder_address(size: int, rank: int) -> int:
    """Workers have the addresses of their ranks; responders come after them."""
    return size + rank

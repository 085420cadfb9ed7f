"""The policies of the consistencies that servers keep, each from its choice in a plan.

Not fresh is a policy of a shard that takes the place of one that was lost.
"""

from weft.distributed.consistency.server.arrival import Arrival
from weft.distributed.consistency.server.policy import AbstractPolicy
from weft.distributed.consistency.server.rounds import Rounds
from weft.specs.loading import load
from weft.specs.plan import Choice, value_of

__all__ = ["asynchronous", "backup", "make_policy", "stale", "synchronous"]


def make_policy(choice: Choice, num_workers: int, *, is_fresh: bool = True) -> AbstractPolicy:
    """The policy of every shard, as the table of axes names it.

    Args:
        choice: the consistency of a plan.
        is_fresh: whether a training begins; else the shard takes the place of one that was lost.
    """
    make = load(value_of("consistency", choice).realised_by["servers"])
    policy: AbstractPolicy = make(choice, num_workers, is_fresh=is_fresh)
    return policy


def synchronous(_choice: Choice, num_workers: int, *, is_fresh: bool) -> AbstractPolicy:
    return Rounds(num_workers, is_fresh=is_fresh)


def asynchronous(_choice: Choice, num_workers: int, *, is_fresh: bool) -> AbstractPolicy:
    return Arrival(num_workers, is_fresh=is_fresh)


def stale(choice: Choice, num_workers: int, *, is_fresh: bool) -> AbstractPolicy:
    if choice["commit"] == "arrival":
        return Arrival(num_workers, float(choice["bound"]), is_fresh=is_fresh)
    return Rounds(num_workers, bound=int(choice["bound"]), is_fresh=is_fresh)


def backup(choice: Choice, num_workers: int, *, is_fresh: bool) -> AbstractPolicy:
    text = str(choice["deadline"])
    seconds = None if text == "adaptive" else float("inf") if text == "none" else float(text)
    return Rounds(num_workers, spare=int(choice["workers"]), deadline=seconds, is_fresh=is_fresh)

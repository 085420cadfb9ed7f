"""What training through servers costs in a step, as data: m bytes of weights, N workers, S shards.

    worker   sends m (its gradient), receives m (weights)
    shard    receives N m / S, sends N m / S

A step is one gradient of every worker, late ones included. With `parts` a worker reaches a part of the shards in each.
Nobody waits for more than its own push and the answer; what a bound or a round makes it wait for is no message.
"""

from weft.errors import UsageError
from weft.planning.consistency_cost import ConsistencyCost
from weft.specs.plan import Plan

__all__ = ["server_cost"]


def server_cost(plan: Plan, num_bytes: float) -> ConsistencyCost:
    """The cost of a plan whose ranks meet at servers; `copies` are those of all processes together.

    >>> from weft.specs import parse_plan
    >>> server_cost(parse_plan("data=4 consistency=async topology=server(shards=2,place=own)"), 1000.0)
    ConsistencyCost(rounds=2, rank_bytes=2000.0, total_bytes=8000.0, copies=1)
    >>> server_cost(parse_plan("data=4 consistency=stale topology=server(shards=2)"), 1000.0).rank_bytes
    3000.0
    """
    if not plan.is_served:
        raise UsageError(f"ranks of this plan meet at no servers ({plan}); use consistency_cost")
    size, shards = plan.num_ranks, int(plan.topology["shards"])
    pushed = num_bytes / int(dict(plan.consistency.parameters).get("parts", 1))
    served = size * pushed / shards
    busiest = max(pushed, served) if plan.topology["place"] == "own" else pushed + served
    return ConsistencyCost(rounds=2, rank_bytes=busiest, total_bytes=2 * size * pushed, copies=1)

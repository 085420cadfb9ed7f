"""What training through servers costs in a step, as data: m bytes of weights, N workers, S shards.

    worker   sends m (its gradient), receives m (weights)
    shard    receives N m / S, sends N m / S

A step is one gradient of every worker, late ones included. With `parts` a worker reaches a part of the shards in each.
Elastic workers send weights instead, and get the centre, in every tau-th step of theirs.
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
    ConsistencyCost(rounds=2.0, rank_bytes=2000.0, total_bytes=8000.0, copies=1)
    >>> server_cost(parse_plan("data=4 consistency=stale topology=server(shards=2)"), 1000.0).rank_bytes
    3000.0
    >>> server_cost(parse_plan("data=4 consistency=elastic(8) topology=server(place=own)"), 1000.0)
    ConsistencyCost(rounds=0.25, rank_bytes=500.0, total_bytes=1000.0, copies=9)
    """
    if not plan.is_served:
        raise UsageError(f"ranks of this plan meet at no servers ({plan}); use consistency_cost")
    size, shards = plan.num_ranks, int(plan.topology["shards"])
    options = dict(plan.consistency.parameters)
    period = int(options.get("steps", 1))
    pushed = num_bytes / int(options.get("parts", 1)) / period
    served = size * pushed / shards
    busiest = max(pushed, served) if plan.topology["place"] == "own" else pushed + served
    # An elastic worker keeps what it sent, and the centre that came back.
    copies = 1 + (2 * size if plan.consistency.name == "elastic" else 0)
    return ConsistencyCost(rounds=2 / period, rank_bytes=busiest, total_bytes=2 * size * pushed, copies=copies)

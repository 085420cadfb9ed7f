"""What training through servers costs in a step, as data: m bytes of weights, N workers, S shards.

    worker   sends m (its gradient), receives m (weights)
    shard    receives N m / S, sends N m / S

A step is one gradient of every worker, late ones included. With `parts` a worker reaches a part of the shards in each.
Elastic workers send weights instead, and get the centre, in every tau-th step of theirs.
Where a host server is in front of K workers, they send to it, and of what it joins goes one push to the shards:

    worker   <-> host server    N m each way, within hosts
    host server  <-> shards     N m / j each way, between hosts, where j of 1 to K gradients are joined on average

Nobody waits for more than its own push and the answer; what a bound or a round makes it wait for is no message.
"""

from dataclasses import dataclass

from weft.errors import UsageError
from weft.planning.consistency_cost import ConsistencyCost
from weft.specs.plan import Plan

__all__ = ["HostedCost", "hosted_cost", "server_cost"]


@dataclass(frozen=True)
class HostedCost:
    """Bytes of a step, both ways and of all together: within hosts, and between them."""

    inside_bytes: float
    between_bytes: float


def hosted_cost(plan: Plan, num_bytes: float, joined: float | None = None) -> HostedCost:
    """What host servers send and receive.

    Args:
        joined: how many gradients are joined into one push, on average; all that there are on a host if not given.

    >>> from weft.specs import parse_plan
    >>> hosted_cost(parse_plan("data=8 consistency=async topology=server(inner=4)"), 1000.0)
    HostedCost(inside_bytes=16000.0, between_bytes=4000.0)
    """
    if not plan.num_hosts:
        raise UsageError(f"plan has no host servers ({plan}); use topology=server(inner=2)")
    pushes = plan.num_hosts if joined is None else plan.num_ranks / joined
    return HostedCost(2 * plan.num_ranks * num_bytes, 2 * pushes * num_bytes)


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
    if plan.channel != "servers":
        raise UsageError(f"ranks of this plan meet at no servers ({plan}); use consistency_cost")
    size, shards = plan.num_ranks, int(plan.topology["shards"])
    if plan.num_hosts:
        return _hosted(plan, num_bytes)
    options = dict(plan.consistency.parameters)
    period = int(options.get("steps", 1))
    pushed = num_bytes / int(options.get("parts", 1)) / period
    served = size * pushed / shards
    busiest = max(pushed, served) if plan.topology["place"] == "own" else pushed + served
    # An elastic worker keeps what it sent, and the centre that came back.
    copies = 1 + (2 * size if plan.consistency.name == "elastic" else 0)
    return ConsistencyCost(rounds=2 / period, rank_bytes=busiest, total_bytes=2 * size * pushed, copies=copies)


def _hosted(plan: Plan, num_bytes: float) -> ConsistencyCost:
    """With all gradients of a host joined. A host server sends one push, and weights to each of its workers, which are
    the last that it keeps."""
    cost = hosted_cost(plan, num_bytes)
    host = (1 + int(plan.topology["inner"])) * num_bytes
    shard = plan.num_hosts * num_bytes / int(plan.topology["shards"])
    busiest = max(host, shard) if plan.topology["place"] == "own" else num_bytes + host + shard
    return ConsistencyCost(4, busiest, cost.inside_bytes + cost.between_bytes, copies=1 + plan.num_hosts)

"""The costs of plans, as one table: bytes and rounds of a step, for m bytes of weights among N ranks.

    sync      an all-reduce of the gradients in every step
    local     an all-reduce of the weights in every H-th step, and of the optimizer's state where it is averaged
    gossip    the weights to each of d neighbours in every step; in pairs, those of the ranks that ask, there and back
    elastic   the weights to rank 0 and the centre back, for each rank in every tau-th step

Through S shards of a server, where a step is one gradient of every worker, late ones included:

    worker   sends m (its gradient), receives m (weights)
    shard    receives N m / S, sends N m / S

With `parts` a worker reaches a part of the shards in each step. Elastic workers send weights instead, and get the
centre, in every tau-th step of theirs. Where a host server is in front of K workers, they send to it, and of what it
joins goes one push to the shards:

    worker   <-> host server    N m each way, within hosts
    host server  <-> shards     N m / j each way, between hosts, where j of 1 to K gradients are joined on average

Means over steps. What evaluations, checkpoints and stop wishes send is not in them, and what a bound or a round of a
server makes a worker wait for is no message.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from weft.errors import UsageError
from weft.planning.collective_cost import ALL_REDUCE_ALGORITHMS, AllReduceAlgorithm, CommunicationCost, all_reduce_cost
from weft.planning.gossip_graphs import make_split, num_neighbours
from weft.specs.plan import Plan

__all__ = ["PLAN_COSTS", "plan_cost"]


@dataclass(frozen=True)
class _Step:
    plan: Plan
    num_bytes: float
    state_bytes: float
    joined: float | None

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return int(dict(self.plan.consistency.parameters).get("steps", 1))


def plan_cost(
    plan: Plan, num_bytes: float, *, state_bytes: float = 0.0, joined: float | None = None
) -> CommunicationCost:
    """The cost of a plan in a step. All-reduces are those of the topology; `native` and `auto` count as a ring.

    Args:
        num_bytes: of the weights, which are also those of the gradients.
        state_bytes: of the optimizer's state, which counts where it is averaged.
        joined: how many gradients a host server joins into one push, on average; all of its host if not given.

    >>> from weft.specs import parse_plan
    >>> cost = plan_cost(parse_plan("data=4"), 1000.0)
    >>> cost.rounds, cost.rank_bytes, cost.total_bytes, cost.copies
    (6, 1500.0, 6000.0, 0)
    >>> cost = plan_cost(parse_plan("data=4 consistency=local(8)"), 1000.0)
    >>> cost.rounds, cost.rank_bytes, cost.total_bytes, cost.copies
    (0.75, 187.5, 750.0, 1)
    >>> plan_cost(parse_plan("data=4 consistency=stale topology=server(shards=2)"), 1000.0).rank_bytes
    3000.0
    >>> plan_cost(parse_plan("data=8 consistency=async topology=server(inner=4)"), 1000.0).between_bytes
    4000.0
    """
    formula = PLAN_COSTS.get((plan.consistency.name, "server" if plan.topology.name == "server" else "peers"))
    if formula is None:
        raise UsageError(f"cost of this plan is not known ({plan}); choose another consistency or topology")
    return formula(_Step(plan, num_bytes, state_bytes, joined))


def _all_reduce(step: _Step, num_bytes: float) -> CommunicationCost:
    topology = step.plan.topology
    algorithm: AllReduceAlgorithm = next((name for name in ALL_REDUCE_ALGORITHMS if name == topology.name), "ring")
    inner = int(topology["inner"]) if algorithm == "hierarchical" else None
    return all_reduce_cost(algorithm, step.plan.num_ranks, num_bytes, ranks_per_host=inner)


def _sync(step: _Step) -> CommunicationCost:
    return _all_reduce(step, step.num_bytes)


def _local(step: _Step) -> CommunicationCost:
    choice, cost = step.plan.consistency, _all_reduce(step, step.num_bytes)
    if choice["state"] == "mean" and step.state_bytes:
        cost = cost.plus(_all_reduce(step, step.state_bytes))
    return replace(cost.mean_over(step.period), copies=3 if choice["outer"] == "nesterov" else 1)


def _gossip(step: _Step) -> CommunicationCost:
    graph, size, num_bytes = str(step.plan.consistency["graph"]), step.plan.num_ranks, step.num_bytes
    if step.plan.consistency["mix"] == "pair":
        split = make_split(graph, size)
        # By chance some rank that answers is asked more often than others; the busiest one of the long run.
        busiest = max(1.0, split.load()) * num_bytes
        return CommunicationCost(2, 2 * num_bytes, num_bytes, busiest, 2 * split.num_asking * num_bytes, copies=2)
    sent = num_neighbours(graph, size) * num_bytes
    return CommunicationCost(1, sent, sent, sent, size * sent, copies=1)


def _elastic(step: _Step) -> CommunicationCost:
    # Rank 0 serves the visitors of a step one after the other; the last of them waits for all.
    visits = step.plan.num_ranks - 1
    sent = visits * step.num_bytes
    return CommunicationCost(2 * visits, 2 * sent, sent, sent, 2 * sent, copies=2).mean_over(step.period)


def _served(step: _Step) -> CommunicationCost:
    plan = step.plan
    if plan.num_hosts:
        return _hosted(step)
    size, shards = plan.num_ranks, int(plan.topology["shards"])
    pushed = step.num_bytes / int(dict(plan.consistency.parameters).get("parts", 1))
    served = size * pushed / shards
    busiest = max(pushed, served) if plan.topology["place"] == "own" else pushed + served
    # Of all processes together: the server's; an elastic worker keeps what it sent, and the centre that came back.
    copies = 1 + (2 * size if plan.consistency.name == "elastic" else 0)
    cost = CommunicationCost(2, 2 * pushed, pushed, busiest, 2 * size * pushed, copies=copies)
    return cost.mean_over(step.period)


def _hosted(step: _Step) -> CommunicationCost:
    """With all gradients of a host joined, a host server sends one push, and to each of its workers the weights, which
    it keeps."""
    plan, num_bytes = step.plan, step.num_bytes
    inside = 2 * plan.num_ranks * num_bytes
    between = 2 * (plan.num_hosts if step.joined is None else plan.num_ranks / step.joined) * num_bytes
    host = (1 + int(plan.topology["inner"])) * num_bytes
    shard = plan.num_hosts * num_bytes / int(plan.topology["shards"])
    busiest = max(host, shard) if plan.topology["place"] == "own" else num_bytes + host + shard
    cost = CommunicationCost(4, 4 * num_bytes, 2 * num_bytes, busiest, inside + between, copies=1 + plan.num_hosts)
    return replace(cost, between_bytes=between)


PLAN_COSTS: Mapping[tuple[str, str], Callable[[_Step], CommunicationCost]] = {
    ("sync", "peers"): _sync,
    ("sync", "server"): _served,
    ("local", "peers"): _local,
    ("gossip", "peers"): _gossip,
    ("elastic", "peers"): _elastic,
    ("elastic", "server"): _served,
    ("async", "server"): _served,
    ("stale", "server"): _served,
    ("backup", "server"): _served,
}
"""By consistency, and by whether ranks meet at servers or among themselves."""

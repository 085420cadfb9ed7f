"""The cost of a step of every plan, address by address, for m bytes of weights among N ranks.

    sync      an all-reduce of the gradients in every step; with shards of the optimizer's state a reduce-scatter of
              them and an all-gather of the weights
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

m is what the codec makes of the weights, or of changes of them; weights on their way to workers are as they are where
it cannot carry them. What no transport can add up is gathered, N m at every rank, and the sum of shards is dense
between them. Means over steps. What evaluations, checkpoints, stop wishes and norms for clipping send is not in them,
nor the loss (8 bytes, and 8 more a tensor, in an all-reduce of their own), nor headers of messages; and what a bound or
a round of a server makes a worker wait for is no message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from weft.errors import UsageError
from weft.planning.codec_cost import CodecCost, Shape, codec_cost
from weft.planning.collective_cost import (
    ALL_REDUCE_ALGORITHMS,
    Algorithm,
    LevelAlgorithm,
    all_reduce_cost,
    collective_cost,
)
from weft.planning.cost import CommunicationCost, Cost
from weft.planning.gossip_graphs import make_split, num_neighbours
from weft.specs.axes import AXES
from weft.specs.loading import load
from weft.specs.plan import Plan, value_of

__all__ = ["Step", "algorithm_of", "plan_cost"]

PACKED = 1
"""Copies of the gradients in a group: they are packed. Large ones travel alone, in memory of their own, and count for
less than this."""

DEALT = 2
"""Messages by which ranks that reach their neighbours alone are told which samples to take."""


@dataclass(frozen=True)
class Step:
    """A step of a plan, whose cost is asked of the row of its consistency."""

    plan: Plan
    num_bytes: float
    state_bytes: float
    joined: float | None
    element_bytes: int
    shapes: Sequence[Shape] | None = None

    @cached_property
    def codec(self) -> CodecCost:
        return codec_cost(self.plan.compress, self.num_bytes, self.element_bytes, self.shapes)

    @property
    def kept_bytes(self) -> float:
        """Of memory for what is sent, where that is not the tensors themselves."""
        return self.codec.sent_bytes if self.codec.touched_bytes else 0.0

    @property
    def carries_weights(self) -> bool:
        return value_of("compress", self.plan.compress).coding.carries_weights

    @property
    def weight_bytes(self) -> float:
        """That are sent of all weights, to who computes with them."""
        return self.sent_bytes if self.carries_weights else self.num_bytes

    @property
    def sent_bytes(self) -> float:
        """That are sent instead of all weights, or gradients."""
        return self.codec.sent_bytes


def plan_cost(
    plan: Plan,
    num_bytes: float,
    *,
    state_bytes: float = 0.0,
    joined: float | None = None,
    element_bytes: int = 4,
    shapes: Sequence[Shape] | None = None,
) -> CommunicationCost:
    """The cost of a plan in a step. All-reduces are those of the topology; `native` and `auto` count as a ring.

    Args:
        num_bytes: of the weights, which are also those of the gradients.
        state_bytes: of the optimizer's state, which counts where it is averaged or split.
        joined: how many gradients a host server joins into one push, on average; all of its host if not given.
        element_bytes: of a number of the weights.
        shapes: of the weights, for compressions that ask; by default they are one matrix.

    >>> from weft.specs import parse_plan
    >>> plan_cost(parse_plan("data=4"), 1000.0).of("worker")
    Cost(bytes_sent=1500.0, rounds=6.0, path_bytes=1500.0, bytes_reduced=750.0, memory=1000.0)
    >>> plan_cost(parse_plan("data=4 consistency=local(8)"), 1000.0).of("worker").bytes_sent
    187.5
    >>> plan_cost(parse_plan("data=4 consistency=stale topology=server(shards=2)"), 1000.0).of("server").bytes_sent
    2000.0
    >>> plan_cost(parse_plan("data=8 consistency=async topology=server(inner=4)"), 1000.0).between_bytes
    4000.0
    """
    if plan.num_shards and plan.channel != "servers":
        raise UsageError(f"cost of this plan is not known ({plan}); choose another consistency or topology")
    formula: Callable[[Step], CommunicationCost] = load(AXES["consistency"][plan.consistency.name].cost)
    return formula(Step(plan, num_bytes, state_bytes, joined, element_bytes, shapes))


def algorithm_of(plan: Plan) -> Algorithm:
    """The all-reduce that a plan's topology counts as."""
    name = plan.topology.name
    if name not in ALL_REDUCE_ALGORITHMS:
        return Algorithm("ring")
    inner, by = int(plan.topology.get("inner", 0)), plan.topology.get("by", "ring")
    return Algorithm(name, inner, cast(LevelAlgorithm, by))


# Rows of the consistency axis: functions of a step.


def synchronous(step: Step) -> CommunicationCost:
    """An update of what all ranks found."""
    plan = step.plan
    if plan.channel == "servers":
        return served(step)
    if plan.shard > 1:
        return _sharded(step)
    return _coded(_summed(step), step).holding(PACKED * step.num_bytes + step.kept_bytes if plan.num_ranks > 1 else 0.0)


def _summed(step: Step) -> CommunicationCost:
    """One message of every rank, added up on all of them: by the transport, in as many rounds as the codec has, or by
    every rank."""
    size = step.plan.num_ranks
    if step.codec.is_gathered:
        return collective_cost("all_gather", size, size * step.sent_bytes)
    cost = all_reduce_cost(algorithm_of(step.plan), size, step.sent_bytes)
    rounds = step.codec.num_rounds
    return replace(cost, addresses=tuple(replace(one, rounds=rounds * one.rounds) for one in cost.addresses))


def _sharded(step: Step) -> CommunicationCost:
    """Of the shards, those at one place of every replica then add up their parts. Messages are packed once, and
    parameters come back into the same memory; a rank holds a part of the state."""
    plan = step.plan
    is_cut = step.carries_weights  # else each part is a message to its owner
    scatter = collective_cost("reduce_scatter" if is_cut else "all_to_all", plan.shard, step.sent_bytes)
    gather = collective_cost("all_gather", plan.shard, step.num_bytes)
    part = all_reduce_cost(algorithm_of(plan), plan.data, step.weight_bytes / plan.shard)
    one = scatter.busiest.plus(part.busiest).plus(gather.busiest)
    # The report of the loss, of all ranks, is waited for meanwhile, and takes longer than the scatter.
    report = all_reduce_cost(algorithm_of(plan), plan.num_ranks, 0)
    one = replace(one, rounds=report.rounds + part.rounds + gather.rounds)
    cost = CommunicationCost((one,) * plan.num_ranks, plan.roles)
    held = PACKED * step.num_bytes + step.kept_bytes * (1 + 1 / plan.shard)
    return _coded(cost, step).holding(held - step.state_bytes * (1 - 1 / plan.shard))


def local(step: Step) -> CommunicationCost:
    """Weights are packed, and the state; an outer optimizer keeps the weights of the last meeting, and its momentum."""
    choice, algorithm, size = step.plan.consistency, algorithm_of(step.plan), step.plan.num_ranks
    cost = _coded(_summed(step), step)
    if choice["state"] == "mean" and step.state_bytes:
        cost = cost.plus(all_reduce_cost(algorithm, size, step.state_bytes)).holding(step.state_bytes)
    copies = 3 if choice["outer"] == "nesterov" else 1
    return cost.mean_over(step.plan.period).holding((PACKED + copies) * step.num_bytes + _rounded(step, copies=2))


def gossip(step: Step) -> CommunicationCost:
    """Neighbours send their weights side by side."""
    plan, sent_bytes = step.plan, step.sent_bytes
    graph = str(plan.consistency["graph"])
    if plan.consistency["mix"] == "pair":
        return _paired(step, graph)
    sent = num_neighbours(graph, plan.num_ranks) * sent_bytes
    if plan.channel == "neighbours":
        worker = Cost(sent, DEALT, sent, sent, step.num_bytes)
        return _coded(CommunicationCost((worker,) * plan.num_ranks + (Cost(),) * plan.num_ranks, plan.roles), step)
    cost = CommunicationCost((Cost(sent, 1, sent, sent),) * plan.num_ranks, plan.roles)
    rounded = _rounded(step, messages=1 + num_neighbours(graph, plan.num_ranks))
    known = 0 if step.carries_weights else 1 + num_neighbours(graph, plan.num_ranks)
    return _coded(cost, step).holding((PACKED + 1 + known) * step.num_bytes + rounded)


def _paired(step: Step, graph: str) -> CommunicationCost:
    """One who asks brings weights, and takes the mean from the responder of one who answers."""
    plan, sent_bytes = step.plan, step.sent_bytes
    split = make_split(graph, plan.num_ranks)
    asks = Cost(sent_bytes, 2, 2 * sent_bytes, 0.0, step.num_bytes)
    answers = Cost(rounds=DEALT, memory=step.num_bytes)
    workers = [asks if is_asking else answers for is_asking in split.asks]
    responders = [Cost(load * sent_bytes, bytes_reduced=load * sent_bytes) for load in split.loads()]
    return _coded(CommunicationCost((*workers, *responders), plan.roles), step)


def elastic(step: Step) -> CommunicationCost:
    """Rank 0 serves all visitors, over one line. Everybody keeps what it sent, and the centre that came back."""
    plan, sent_bytes = step.plan, step.sent_bytes
    if plan.channel == "servers":
        return _at_servers(step, reduced=sent_bytes, copies=2)
    visits = plan.num_ranks - 1
    home = Cost(visits * sent_bytes, 2, 2 * visits * sent_bytes, plan.num_ranks * sent_bytes)
    visitor = Cost(sent_bytes, 2, 2 * sent_bytes, sent_bytes)
    cost = CommunicationCost((home, *[visitor] * visits), plan.roles)
    held = (PACKED + 2) * step.num_bytes + _rounded(step, copies=2, messages=2)
    return _coded(cost, step).mean_over(step.plan.period).holding(held)


def served(step: Step) -> CommunicationCost:
    return _hosted(step) if step.plan.num_hosts else _at_servers(step)


def _at_servers(step: Step, *, reduced: float = 0.0, copies: int = 0) -> CommunicationCost:
    """Shards hold the weights, add up what comes, and answer it. A worker keeps what it has for shards whose turn it is
    not.

    Args:
        reduced: bytes that a worker adds up.
        copies: of the weights, which it keeps.
    """
    plan, size, shards = step.plan, step.plan.num_ranks, step.plan.num_shards
    parts = int(plan.consistency.get("parts", 1))
    pushed, answered = step.sent_bytes / parts, step.weight_bytes / parts
    pending, at_shard, given = (1 - 1 / parts) * step.num_bytes, size * pushed / shards, size * answered / shards
    worker = Cost(pushed, 2, pushed + answered, reduced)
    shard = Cost(given, 2, at_shard + given, at_shard, step.num_bytes / shards)
    cost = _coded(CommunicationCost((worker,) * size + (shard,) * shards, plan.roles), step)
    return cost.mean_over(step.plan.period).holding(copies * step.num_bytes + pending)


def _hosted(step: Step) -> CommunicationCost:
    """With all gradients of a host joined, a host server sends one push, and to each of its workers the weights, which
    it keeps."""
    plan, sent_bytes, shards = step.plan, step.sent_bytes, step.plan.num_shards
    both_ways = sent_bytes + step.weight_bytes
    inner = plan.ranks_per_host
    on_host = [min(inner, plan.num_ranks - host * inner) for host in range(plan.num_hosts)]
    forwards = [1.0 if step.joined is None else num_ranks / step.joined for num_ranks in on_host]
    at_shard = sum(forwards) * sent_bytes / shards
    given = sum(forwards) * step.weight_bytes / shards
    worker = Cost(sent_bytes, 4, 2 * both_ways)
    shard = Cost(given, 2, at_shard + given, at_shard, step.num_bytes / shards)
    hosts = [
        Cost(
            num_ranks * step.weight_bytes + sent * sent_bytes,
            4,
            (num_ranks + sent) * both_ways,
            num_ranks * sent_bytes,
            step.num_bytes,
        )
        for num_ranks, sent in zip(on_host, forwards, strict=True)
    ]
    addresses = (worker,) * plan.num_ranks + (shard,) * shards + tuple(hosts)
    cost = _coded(CommunicationCost(addresses, plan.roles), step)
    return replace(cost, between_bytes=sum(forwards) * both_ways)


def _rounded(step: Step, *, copies: int = 1, messages: int = 1) -> float:
    """Bytes that a rank which sends weights holds in a group, where they are not sent as they are: encoded messages,
    one more for synchronous steps, and weights as others see them."""
    return copies * step.num_bytes + (1 + messages) * step.kept_bytes if step.kept_bytes else 0.0


def _coded(cost: CommunicationCost, step: Step) -> CommunicationCost:
    """With what the codec does, and keeps, at every worker."""
    codec = Cost(bytes_reduced=step.codec.touched_bytes, memory=step.codec.memory_bytes)
    pairs = zip(cost.addresses, cost.roles.kinds, strict=True)
    return replace(cost, addresses=tuple(one.plus(codec) if kind == "worker" else one for one, kind in pairs))

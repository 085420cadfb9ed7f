"""What each consistency costs in a step, as data: messages of m bytes of weights or gradients among N ranks.

    sync      an all-reduce of the gradients in every step
    local     an all-reduce of the weights in every H-th step, and of the optimizer's state where it is averaged
    gossip    the weights to each of d neighbours in every step; in pairs, those of the ranks that ask, there and back
    elastic   the weights to rank 0 and the centre back, for each rank in every tau-th step

Means over steps. What evaluations, checkpoints and stop wishes send is not in them.
"""

from dataclasses import dataclass

from weft.errors import UsageError
from weft.planning.collective_cost import AllReduceAlgorithm, all_reduce_cost
from weft.planning.gossip_graphs import make_split
from weft.specs.plan import Choice

__all__ = ["ConsistencyCost", "consistency_cost", "num_neighbours"]


@dataclass(frozen=True)
class ConsistencyCost:
    """Per step. `rank_bytes` is what the busiest rank sends, `total_bytes` what all send; `rounds` is how many messages
    one rank waits for one after the other; `copies` is how many times the weights are kept besides the model's own."""

    rounds: float
    rank_bytes: float
    total_bytes: float
    copies: int


def consistency_cost(
    choice: Choice, size: int, num_bytes: float, *, algorithm: AllReduceAlgorithm = "ring", state_bytes: float = 0.0
) -> ConsistencyCost:
    """The cost of a plan's consistency among `size` ranks, for `num_bytes` of weights.

    Args:
        algorithm: of the all-reduces.
        state_bytes: the optimizer's slots, which count where they are averaged.

    >>> consistency_cost(Choice("sync"), 4, 1000.0)
    ConsistencyCost(rounds=6, rank_bytes=1500.0, total_bytes=6000.0, copies=0)
    >>> parameters = (("steps", 8), ("state", "keep"), ("outer", "none"))
    >>> consistency_cost(Choice("local", parameters), 4, 1000.0)
    ConsistencyCost(rounds=0.75, rank_bytes=187.5, total_bytes=750.0, copies=1)
    """
    if choice.name == "sync":
        cost = all_reduce_cost(algorithm, size, num_bytes)
        return ConsistencyCost(cost.rounds, cost.rank_bytes, cost.total_bytes, 0)
    if choice.name == "local":
        return _local(choice, size, num_bytes, algorithm, state_bytes)
    if choice.name == "gossip" and choice["mix"] == "pair":
        split = make_split(str(choice["graph"]), size)
        # By chance some rank that answers is asked more often than others; the busiest one of the long run.
        busiest = max(1.0, split.load()) * num_bytes
        return ConsistencyCost(2, busiest, 2 * split.num_asking * num_bytes, 2)
    if choice.name == "gossip":
        degree = num_neighbours(str(choice["graph"]), size)
        return ConsistencyCost(1, degree * num_bytes, size * degree * num_bytes, 1)
    if choice.name == "elastic":
        period, others = int(choice["steps"]), size - 1
        # Rank 0 serves the visitors of a step one after the other; the last of them waits for all.
        return ConsistencyCost(2 * others / period, others * num_bytes / period, 2 * others * num_bytes / period, 2)
    raise UsageError(f"cost of this consistency is not known ({choice.name}); use sync, local, gossip or elastic")


def _local(
    choice: Choice, size: int, num_bytes: float, algorithm: AllReduceAlgorithm, state_bytes: float
) -> ConsistencyCost:
    period = int(choice["steps"])
    costs = [all_reduce_cost(algorithm, size, num_bytes)]
    if choice["state"] == "mean" and state_bytes:
        costs.append(all_reduce_cost(algorithm, size, state_bytes))
    return ConsistencyCost(
        rounds=sum(cost.rounds for cost in costs) / period,
        rank_bytes=sum(cost.rank_bytes for cost in costs) / period,
        total_bytes=sum(cost.total_bytes for cost in costs) / period,
        copies=3 if choice["outer"] == "nesterov" else 1,
    )


def num_neighbours(graph: str, size: int) -> int:
    """How many ranks each rank of a gossip graph hears.

    >>> [num_neighbours(graph, 64) for graph in ("ring", "torus", "exponential", "complete")]
    [2, 4, 6, 63]
    """
    if graph == "ring":
        return min(2, size - 1)
    if graph == "exponential":
        return (size - 1).bit_length()
    if graph == "complete":
        return size - 1
    height = next(h for h in range(int(size**0.5), 0, -1) if size % h == 0)
    return min(2, height - 1) + min(2, size // height - 1)

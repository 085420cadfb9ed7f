"""The cost of a split: what a rank holds, sends and waits for in a step, by the numbers of the model.

    shard     state over N ranks; at level 2 gradients too; at level 3 parameters, gathered for forward and backward

              bytes held              level 1     level 2     level 3        bytes sent, m those of the parameters
              parameters                 m           m          m/N          level 1, 2    2 (N-1)/N m
              gradients                  m          m/N         m/N          level 3       3 (N-1)/N m
              optimizer state           s/N         s/N         s/N

    tensor    an all-reduce of activations where a row-split layer ends, and one of their gradients where a column-split
              one begins: 2 (N-1)/N a each, for a bytes
    halo      the edge rows of a picture to each neighbour, and their gradients back
    pipeline  activations of every micro-batch to the next stage, and their gradients back; a stage has nothing to do
              for (n-1)/(m+n-1) of the time
    expert    tokens to their experts and back, and so for gradients: four all-to-alls
    linear    activations of all ranks to each (all-gather), outputs back to whose samples they are (reduce-scatter),
              and gradients the other way

Activations may travel in a format of fewer bytes: activation_cost.py.

All are of one rank. Groups of data-parallel copies pay for gradients on top, as plan_cost.py says.
"""

from dataclasses import dataclass

from weft.planning.activation_cost import activation_bytes, is_added_by_group
from weft.planning.collective_cost import Algorithm, all_reduce_cost, collective_cost
from weft.planning.cost import Cost
from weft.specs.plan import Choice

__all__ = [
    "Held",
    "bubble_share",
    "cut_cost",
    "expert_cost",
    "halo_cost",
    "linear_cost",
    "pipeline_cost",
    "sharded_cost",
    "sharded_memory",
    "share_cost",
    "tensor_cost",
]

RING = Algorithm("ring")


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds from step to step, gradients while they wait for the update."""

    parameters: float
    gradients: float
    state: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.state


def sharded_memory(level: int, num_ranks: int, parameter_bytes: float, state_bytes: float) -> Held:
    """Of ZeRO at a level from 0 (nothing is split) to 3.

    >>> [sharded_memory(level, 4, 1000.0, 2000.0).total for level in range(4)]
    [4000.0, 2500.0, 1750.0, 1000.0]
    """
    split = [1 / num_ranks if level >= least else 1.0 for least in (3, 2, 1)]
    return Held(parameter_bytes * split[0], parameter_bytes * split[1], state_bytes * split[2])


def sharded_cost(level: int, num_ranks: int, parameter_bytes: float) -> Cost:
    """Gradients are scattered to their owners, parameters gathered from them: once, or at level 3 for forward and again
    for backward.

    >>> [sharded_cost(level, 4, 1000.0).bytes_sent for level in (1, 2, 3)]
    [1500.0, 1500.0, 2250.0]
    """
    gather = collective_cost("all_gather", num_ranks, parameter_bytes).busiest
    scatter = collective_cost("reduce_scatter", num_ranks, parameter_bytes).busiest
    return scatter.plus(gather).plus(gather if level >= 3 else Cost())


def tensor_cost(num_ranks: int, num_bytes: float, num_pairs: int = 1, *, activations: Choice | str = "none") -> Cost:
    """Of layers in pairs, a column-split one and then a row-split one: an all-reduce of activations forward, and one of
    their gradients backward. Of 8-bit messages, which no group adds up, two ranks gather each other's; more exchange
    parts, whose scales of their own (at most 4 bytes for each rank and part) are not counted.

    Args:
        num_bytes: of the activations after a pair, as float32.
        activations: the format in which they travel.

    >>> tensor_cost(2, 1000.0, num_pairs=2).bytes_sent, tensor_cost(2, 16384.0, activations="tree8").bytes_sent
    (4000.0, 8208.0)
    """
    message = activation_bytes(activations, num_bytes)
    if num_ranks == 2 and message < num_bytes and not is_added_by_group(activations):
        one = collective_cost("all_gather", num_ranks, num_ranks * message).busiest
    else:
        one = all_reduce_cost(RING, num_ranks, message).busiest
    return _times(one, 2 * num_pairs)


def halo_cost(edge_bytes: float, num_neighbours: int = 2) -> Cost:
    """Of a convolution whose picture is cut into strips: the rows that a neighbour needs, and their gradients back."""
    sent = edge_bytes * num_neighbours
    return Cost(bytes_sent=2 * sent, rounds=2, path_bytes=2 * edge_bytes)


def pipeline_cost(
    num_micro_batches: int, in_bytes: float, out_bytes: float, *, activations: Choice | str = "none"
) -> Cost:
    """Of a stage: activations of a micro-batch go out, and gradients of those that came in go back. Rounds are those of
    the first micro-batch: the others come while it computes.

    Args:
        in_bytes: of a value that comes in, as float32.
        out_bytes: of one that goes out.
        activations: the format in which they travel.

    >>> pipeline_cost(8, 0.0, 100.0).bytes_sent, pipeline_cost(8, 0.0, 16384.0, activations="bf16").bytes_sent
    (800.0, 65536.0)
    """
    in_bytes, out_bytes = (activation_bytes(activations, one) for one in (in_bytes, out_bytes))
    sent = num_micro_batches * (in_bytes + out_bytes)
    return Cost(bytes_sent=sent, rounds=2, path_bytes=in_bytes + out_bytes)


def bubble_share(num_stages: int, num_micro_batches: int, chunks: int = 1) -> float:
    """Of a stage's time in which it has nothing to do: GPipe and 1F1B with one chunk, interleaved with several.

    >>> bubble_share(2, 8), bubble_share(4, 4), bubble_share(4, 4, chunks=2)
    (0.1111111111111111, 0.42857142857142855, 0.2727272727272727)
    """
    idle = (num_stages - 1) / chunks
    return idle / (num_micro_batches + idle)


def expert_cost(num_ranks: int, token_bytes: float) -> Cost:
    """Of a layer of experts, where the tokens that a rank sends out (each to its k experts) have so many bytes, and go
    evenly to all: to the experts, back, and both ways for gradients.

    >>> expert_cost(4, 1000.0).bytes_sent
    3000.0
    """
    return _times(collective_cost("all_to_all", num_ranks, token_bytes).busiest, 4)


def linear_cost(num_ranks: int, in_bytes: float, out_bytes: float) -> Cost:
    """Of layers that ranks with different samples split: `in_bytes` and `out_bytes` are the activations of all samples.

    >>> linear_cost(4, 1000.0, 400.0).bytes_sent
    2100.0
    """
    gather = collective_cost("all_gather", num_ranks, in_bytes).busiest
    scatter = collective_cost("reduce_scatter", num_ranks, out_bytes).busiest
    return _times(gather.plus(scatter), 2)


def share_cost(num_ranks: int, every: float = float("inf")) -> Cost:
    """Of shares by speed: ranks tell each other theirs, 8 bytes each, once in so many steps; of equal ones nothing.

    >>> share_cost(4, every=8).bytes_sent, share_cost(4).bytes_sent
    (3.0, 0.0)
    """
    return collective_cost("all_gather", num_ranks, 8.0 * num_ranks).busiest.mean_over(every)


def cut_cost(
    num_ranks: int, num_stages: int, num_steps: float = float("inf"), *, measures_speeds: bool = False
) -> Cost:
    """Of a cut into stages, which is made once for so many steps: rank 0 tells where, 8 bytes for each place; where
    speeds are measured, ranks tell each other theirs before that.

    >>> cut_cost(4, 2, num_steps=1).bytes_sent, cut_cost(4, 2).bytes_sent
    (16.0, 0.0)
    """
    told = collective_cost("broadcast", num_ranks, 8.0 * (num_stages - 1)).busiest
    speeds = collective_cost("all_gather", num_ranks, 8.0 * num_ranks).busiest if measures_speeds else Cost()
    return told.plus(speeds).mean_over(num_steps)


def _times(cost: Cost, number: int) -> Cost:
    total = Cost()
    for _ in range(number):
        total = total.plus(cost)
    return total

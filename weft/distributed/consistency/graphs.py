"""Who mixes weights with whom, and how much each counts: graphs over ranks and their doubly stochastic matrices.

Every rank has as many neighbours as every other, and hears each of them as loudly as itself: the rows and the columns
of the matrix sum to 1, so that mixing keeps the mean of all weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.distributed.group.calls import NeighbourGraph
from weft.planning.gossip_graphs import GRAPHS

__all__ = ["GRAPHS", "Mixing", "draw_all", "make_mixing", "weigh_alike"]


@dataclass(frozen=True)
class Mixing:
    """A graph, and for each rank the weight of its own and of each neighbour's tensor (as NeighbourAllReduce takes)."""

    graph: NeighbourGraph
    weights: tuple[tuple[float, ...], ...]

    @property
    def num_neighbours(self) -> int:
        return len(self.graph[0])

    def matrix(self) -> Tensor:
        """W: after a round, the weights of rank i are sum_j W[i, j] x_j. Shape (ranks, ranks), float64."""
        size = len(self.graph)
        matrix = torch.zeros(size, size, dtype=torch.float64)
        for rank, (sources, (own, *others)) in enumerate(zip(self.graph, self.weights, strict=True)):
            matrix[rank, rank] = own
            for source, weight in zip(sources, others, strict=True):
                matrix[rank, source] = weight
        return matrix

    def contraction(self) -> float:
        """By how much a round shrinks the distance from the mean at the least: the second singular value of W."""
        size = len(self.graph)
        around_mean = self.matrix() - torch.full((size, size), 1 / size, dtype=torch.float64)
        return float(torch.linalg.matrix_norm(around_mean, ord=2))


def make_mixing(name: str, size: int) -> Mixing:
    """The graph of this name over so many ranks.

    >>> make_mixing("ring", 4).graph
    ((1, 3), (0, 2), (1, 3), (0, 2))
    >>> make_mixing("ring", 2).weights
    ((0.5, 0.5), (0.5, 0.5))
    """
    graph = tuple(tuple(sorted(GRAPHS[name](rank, size) - {rank})) for rank in range(size))
    return Mixing(graph, tuple(weigh_alike(len(sources)) for sources in graph))


def weigh_alike(num_neighbours: int) -> tuple[float, ...]:
    """The weights of a rank's own tensor and of so many others: a row of W.

    >>> weigh_alike(1)
    (0.5, 0.5)
    """
    return (1 / (1 + num_neighbours),) * (1 + num_neighbours)


@torch.no_grad()
def draw_all(own: Sequence[Tensor], seen: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> None:
    """In place: x + sum_j w (q(x_j) - q(x)), where ranks see of each other what a codec sends; w as `weigh_alike` says.

    It keeps the digits of x that are not sent, and the mean of all ranks.

    Args:
        own: the messages of x.
        seen: those of q(x), as the others see it.
        others: those of q(x_j), in the order of the sum.

    >>> own = [torch.tensor([1.25])]
    >>> draw_all(own, [torch.tensor([1.0])], [[torch.tensor([3.0])]])
    >>> own
    [tensor([2.2500])]
    """
    _, *weights = weigh_alike(len(others))
    for message, mine, *theirs in zip(own, seen, *others, strict=True):
        for other, weight in zip(theirs, weights, strict=True):
            message.add_((other - mine).mul_(weight))

"""The calls of a group, as data: one frozen dataclass per collective.

A call names its tensors and nothing is returned: results are written in place. Because a call is data, a wrapper that
counts, delays or drops needs to know one method (`start`), and a schedule of calls can be drawn and checked.

Reductions follow the order of ranks, ((x0 + x1) + x2) + ..., on every kind that reduces by itself.

Parts are equal unless their sizes are given, in rows along dimension 0, one for each rank; a part may have none:

    sizes (2, 0, 1)     | row 0 | row 1 | row 2 |
                        |    rank 0     | rank 2 |
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Barrier",
    "Broadcast",
    "Call",
    "NeighbourAllReduce",
    "NeighbourGraph",
    "Recv",
    "Reduce",
    "ReduceOp",
    "ReduceScatter",
    "Send",
    "Sizes",
]

ReduceOp = Literal["sum", "mean", "min", "max", "product"]

NeighbourGraph = tuple[tuple[int, ...], ...]
"""`graph[r]` lists the ranks that rank r receives from, in order; a rank sends to all that list it."""

Sizes = tuple[int, ...]
"""Rows along dimension 0 of each rank's part, in rank order."""


@dataclass(frozen=True, slots=True)
class Send:
    tensor: Tensor
    peer: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """Written into `tensor`, whose size and type are those of the matching Send."""

    tensor: Tensor
    peer: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class AllReduce:
    """In place. `mean` is the sum divided by the size."""

    tensor: Tensor
    op: ReduceOp = "sum"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """`output` is part `rank` of the sum of all `tensor`s, which hold a part for each rank along dimension 0.

    All ranks give the same `sizes`. `output` may be that part of `tensor` itself.
    """

    output: Tensor
    tensor: Tensor
    op: ReduceOp = "sum"
    sizes: Sizes | None = None


@dataclass(frozen=True, slots=True)
class AllGather:
    """`output` holds every rank's `tensor`, in rank order along dimension 0. All ranks give the same `sizes`. `tensor`
    may be this rank's part of `output` itself."""

    output: Tensor
    tensor: Tensor
    sizes: Sizes | None = None


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Part i of `tensor` goes to rank i; part j of `output` comes from rank j.

    Where one rank gives sizes, all do, and both: what rank i sends to rank j is what rank j receives from rank i.
    """

    output: Tensor
    tensor: Tensor
    send_sizes: Sizes | None = None
    recv_sizes: Sizes | None = None


@dataclass(frozen=True, slots=True)
class Broadcast:
    tensor: Tensor
    root: int = 0


@dataclass(frozen=True, slots=True)
class Reduce:
    """In place at `root`; the tensors of the other ranks are left as they are."""

    tensor: Tensor
    root: int = 0
    op: ReduceOp = "sum"


@dataclass(frozen=True, slots=True)
class NeighbourAllReduce:
    """In place: `weights[rank][0]` times the own tensor plus `weights[rank][1 + i]` times the i-th neighbour's."""

    tensor: Tensor
    graph: NeighbourGraph
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Barrier:
    pass


Call = (
    Send | Recv | AllReduce | ReduceScatter | AllGather | AllToAll | Broadcast | Reduce | NeighbourAllReduce | Barrier
)

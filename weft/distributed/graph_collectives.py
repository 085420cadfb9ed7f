"""Groups behind the collectives of a graph: a captured step talks to the ranks of any kind of group."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor

from weft.distributed.group.calls import AllReduce, ReduceOp
from weft.distributed.group.group import AbstractGroup
from weft.graph import use_collectives

__all__ = ["use_group_in_graphs"]


@contextmanager
def use_group_in_graphs(group: AbstractGroup, name: str = "world") -> Iterator[None]:
    """Let the operators `weft::all_reduce` and `weft::wait` of graphs that run inside reach this group."""

    def start(tensor: Tensor, op: str) -> Callable[[], None]:
        return group.start(AllReduce(tensor, cast(ReduceOp, op))).wait

    with use_collectives(start, name):
        yield

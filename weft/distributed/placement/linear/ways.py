"""How each layer of a chain is split, and in which layout activations pass between them: the cheapest of all ways.

    y = x W^T        columns    every rank has some outputs of the layer: x whole -> y part
                     rows       every rank has some inputs of the layer:  x part  -> a term of y

    before     input must be         output is          after
    own        columns: whole  F     columns: part      own    columns: G / N    rows: G
    part       rows:    part         rows:    a sum     part   columns: 0        rows: G
               from own:  F / N
               from part: 0

A layer has F inputs and G outputs; costs are elements that a rank sends, times samples (N - 1) / N, in forward, and the
same in backward. With N = 4, a chain of 2048 -> 4096 -> 4096 -> 10:

    own ==2048==> columns -- part ==4096==> columns -- part -- rows ==10==> own            6154
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Between", "Split", "Way", "choose_ways", "cost_of"]

Split = Literal["columns", "rows"]
Between = Literal["own", "part"]


@dataclass(frozen=True)
class Way:
    """How one layer is split, and the layouts of its inputs and outputs."""

    before: Between
    split: Split
    after: Between


WAYS = tuple(Way(a, split, b) for a in ("own", "part") for split in ("columns", "rows") for b in ("own", "part"))


def cost_of(way: Way, num_inputs: int, num_outputs: int, num_ranks: int) -> float:
    """Elements that a rank sends in forward, times samples (N - 1) / N.

    Args:
        num_inputs: of the layer, in the whole.
        num_outputs: likewise.

    >>> cost_of(Way("own", "columns", "part"), 2048, 4096, 4), cost_of(Way("part", "rows", "own"), 4096, 10, 4)
    (2048, 10)
    """
    if way.split == "columns":
        return num_inputs + (num_outputs / num_ranks if way.after == "own" else 0)
    return num_outputs + (num_inputs / num_ranks if way.before == "own" else 0)


def choose_ways(sizes: Sequence[tuple[int, int]], joints: Sequence[bool], num_ranks: int) -> tuple[Way, ...]:
    """The cheapest way through a chain of layers that begins and ends with each rank's own samples.

    Args:
        sizes: inputs and outputs of each layer.
        joints: whether activations may be in parts after each layer but the last.

    >>> [way.split for way in choose_ways([(2048, 4096), (4096, 4096), (4096, 10)], [True, True], 4)]
    ['columns', 'columns', 'rows']
    """
    best: dict[Between, tuple[float, tuple[Way, ...]]] = {"own": (0.0, ())}
    for (num_inputs, num_outputs), may_be_part in zip(sizes, (*joints, False), strict=True):
        reached: dict[Between, tuple[float, tuple[Way, ...]]] = {}
        for way in WAYS:
            if way.before not in best or (way.after == "part" and not may_be_part):
                continue
            cost, before = best[way.before]
            cost += cost_of(way, num_inputs, num_outputs, num_ranks)
            if way.after not in reached or cost < reached[way.after][0]:
                reached[way.after] = cost, (*before, way)
        best = reached
    return best["own"][1]

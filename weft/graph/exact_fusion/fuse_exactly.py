"""Exact fusion: parts of a graph as regions that have the bits of the operators inside.

    velocity * 0.9 + gradient;  weight - velocity * lr      one call and one pass over memory instead of three

It is what generated Python does by default. Regions that may round differently are Inductor's.
"""

from collections.abc import Iterator

from torch import fx

from weft.graph.exact_fusion.cpp_source import is_expressible
from weft.graph.exact_fusion.kernel import find_kernel
from weft.graph.fusion.contraction import boundary_of, contract_parts
from weft.graph.fusion.partition import connected, levels_of
from weft.graph.fusion.region import make_region
from weft.graph.ir.graph import Graph

__all__ = ["fuse_exactly"]


def fuse_exactly(graph: Graph) -> Graph:
    """Make regions of element-wise chains, where a compiled one is seen to have the same bits.

    A chain has two calls or more, of one part of the step. All its tensors have one layout, since an operator of the
    table takes and gives nothing else but scalars.
    """
    return contract_parts(graph, lambda after, part: filter(_has_kernel, _chains(after, part)))


def _chains(graph: Graph, part: str) -> Iterator[list[fx.Node]]:
    members = {made.node for made in graph.operators if made.role == part and is_expressible(made.node)}
    for level in levels_of(graph.nodes, members).values():
        yield from (chain for chain in connected(level) if len(chain) > 1)


def _has_kernel(group: list[fx.Node]) -> bool:
    boundary = boundary_of(group)
    return find_kernel(make_region(group, boundary.inputs, boundary.outputs)) is not None

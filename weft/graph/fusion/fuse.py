"""JIT fusion: element-wise parts of a graph become regions, which an executor compiles as one function each.

update      all of one level together, "foreach" style: one call goes over many parameters
backward    what is connected
forward     what is connected
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, fx

from weft.graph.fusion.contraction import boundary_of, contract_parts
from weft.graph.fusion.members import is_view_in_region, members_of
from weft.graph.fusion.partition import connected, in_chunks, levels_of
from weft.graph.fusion.region import Region, region_of
from weft.graph.ir.graph import Graph, owner_of
from weft.graph.ir.verification import check_pass
from weft.graph.rewrites.price import price_of_node
from weft.operators import tensor_bytes

__all__ = ["fuse", "is_cheaper", "regions_of", "unfuse"]

_LARGEST = 400  # calls: a compiler's time grows faster than the region
# In bytes that could move meanwhile (see price.py): a region is called through Python, and makes each output there.
_BYTES_PER_REGION = 60_000
_BYTES_PER_TENSOR = 3_000


def fuse(graph: Graph, *, worth: Callable[[Sequence[fx.Node]], bool] | None = None) -> Graph:
    """Make regions of the element-wise parts of a graph, where that is cheaper. Nothing is compiled yet.

    Regions hold no operator that draws random numbers or talks to other ranks, no constants, and no tensor whose shape
    is symbolic. Run as it is, the graph computes the same bits; compiled, a region may round differently.

    Args:
        worth: which groups of calls, in their order, are to be regions; by default those that are cheaper as one.
    """
    return contract_parts(graph, lambda after, part: filter(worth or is_cheaper, _groups(after, part)))


def unfuse(graph: Graph) -> Graph:
    """Put the operators of each region back in its place: the reverse of `fuse`."""
    if not regions_of(graph):
        return graph
    nodes = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    insides: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes.nodes:
        region = region_of(node.target)
        if region is not None:
            insides[node] = _opened(nodes, node, region, copies)
        elif node.target is operator.getitem and node.args[0] in insides:
            owner, index = cast(tuple[fx.Node, int], node.args)
            copies[node] = insides[owner][index]
        else:
            copies[node] = nodes.node_copy(node, copies.__getitem__)
    after = replace(graph, nodes=nodes)
    check_pass(graph, after)
    return after


def regions_of(graph: Graph) -> dict[str, Region]:
    """The different regions of a graph by name, in order."""
    found = (region_of(node.target) for node in graph.nodes.nodes if node.op == "call_function")
    return {region.name: region for region in found if region is not None}


def is_cheaper(group: Sequence[fx.Node]) -> bool:
    """Whether one call that moves what goes in and out costs less than the calls one by one."""
    boundary = boundary_of(group)
    inputs, outputs = ([node.meta["val"] for node in side] for side in (boundary.inputs, boundary.outputs))
    price = _BYTES_PER_REGION + _BYTES_PER_TENSOR * (len(inputs) + len(outputs)) + tensor_bytes(*inputs, *outputs)
    return price < sum(map(price_of_node, group))


def _groups(graph: Graph, part: str) -> Iterator[list[fx.Node]]:
    roles = {made.node: made.role for made in graph.operators}
    members = {node for node in members_of(graph.nodes) if roles[owner_of(node)] == part}
    order = {node: i for i, node in enumerate(graph.nodes.nodes)}
    for level in levels_of(graph.nodes, members).values():
        weights = {node: int(owner_of(node) is node and not is_view_in_region(node)) for node in level}
        if part == "update":
            chunks = in_chunks(connected(level, _shared_scalars(level)), weights, _LARGEST)
        else:
            chunks = (chunk for each in connected(level) for chunk in in_chunks([each], weights, _LARGEST))
        for chunk in chunks:
            chunk.sort(key=order.__getitem__)
            if any(weights[node] for node in chunk) and boundary_of(chunk).outputs:
                yield chunk


def _shared_scalars(level: Sequence[fx.Node]) -> set[fx.Node]:
    """Scalars that come of nothing but scalars: a learning rate, but not the norm of a gradient."""
    inside, found = set(level), set[fx.Node]()
    for node in level:
        value = node.meta["val"]
        is_scalar = isinstance(value, Tensor) and value.dim() == 0
        if is_scalar and all(source in found for source in node.all_input_nodes if source in inside):
            found.add(node)
    return found


def _opened(nodes: fx.Graph, call: fx.Node, region: Region, copies: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    given: Any = call.args[0]
    inside = dict(zip(region.nodes.nodes, (copies[node] for node in given), strict=False))
    for node in region.nodes.nodes:
        if node.op == "call_function":
            inside[node] = nodes.node_copy(node, inside.__getitem__)
            inside[node].meta.update({key: value for key, value in call.meta.items() if key != "val"})
    return [inside[node] for node in region.output_nodes]

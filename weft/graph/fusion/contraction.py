"""Contraction: groups of nodes become one call each, and the rest is put in an order that allows it."""

import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from weft.graph.fusion.members import is_view_in_region
from weft.graph.fusion.partition import predecessors_of
from weft.graph.fusion.region import make_region
from weft.graph.ir.graph import Graph
from weft.graph.ir.verification import check_pass

__all__ = ["Boundary", "boundary_of", "contract_parts"]

Group = Sequence[fx.Node]


@dataclass(frozen=True)
class Boundary:
    """The values that go into a group of nodes and that come out.

    A region gives away no views, since an operator's results must be memory of their own. A view inside that others
    read too is therefore taken once more outside, from what it looks at.
    """

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    views: list[fx.Node]


def boundary_of(group: Group) -> Boundary:
    inside, wanted = set(group), set[fx.Node]()
    for node in reversed(group):
        if any(user not in inside or (user in wanted and is_view_in_region(user)) for user in node.users):
            wanted.add(node)
    return Boundary(
        inputs=list(dict.fromkeys(s for node in group for s in node.all_input_nodes if s not in inside)),
        outputs=[node for node in group if node in wanted and not is_view_in_region(node)],
        views=[node for node in group if node in wanted and is_view_in_region(node)],
    )


def contract_parts(graph: Graph, groups_of: Callable[[Graph, str], Iterable[Group]]) -> Graph:
    """Make a region of each group of a part of the step: update, then backward, then forward.

    One part at a time, so that a region belongs to one of them; the last part first, since nothing reads it.
    """
    after = graph
    for part in ("update", "backward", "forward"):
        groups = list(groups_of(after, part))
        if groups:
            after = replace(after, nodes=contract(after.nodes, groups))
    check_pass(graph, after)
    return after


def contract(nodes: fx.Graph, groups: Sequence[Group]) -> fx.Graph:
    """A graph in which each group is the call of its region. The groups must be such that this makes no ring."""
    unit_of: dict[fx.Node, int] = {}
    units: list[Group] = []
    for group in groups:
        unit_of.update(dict.fromkeys(group, len(units)))
        units.append(group)
    for node in nodes.nodes:
        if node not in unit_of:
            unit_of[node] = len(units)
            units.append([node])
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number in _in_order(nodes, units, unit_of):
        if number < len(groups):
            _call_region(made, units[number], copies)
        else:
            (node,) = units[number]
            copies[node] = made.node_copy(node, copies.__getitem__)
    return made


def _in_order(nodes: fx.Graph, units: Sequence[Group], unit_of: dict[fx.Node, int]) -> list[int]:
    """An order in which every unit comes after those that it needs, as near as can be to the one that was."""
    place = {node: i for i, node in enumerate(nodes.nodes)}
    before = predecessors_of(nodes)
    needs: list[set[int]] = [{unit_of[b] for node in unit for b in before[node]} - {i} for i, unit in enumerate(units)]
    readers: list[list[int]] = [[] for _ in units]
    for i, needed in enumerate(needs):
        for other in needed:
            readers[other].append(i)
    missing = [len(needed) for needed in needs]
    ready = [(place[units[i][-1]], i) for i, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for reader in readers[i]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (place[units[reader][-1]], reader))
    assert len(order) == len(units), "groups form a ring"
    return order


def _call_region(made: fx.Graph, group: Group, copies: dict[fx.Node, fx.Node]) -> None:
    boundary = boundary_of(group)
    region = make_region(group, boundary.inputs, boundary.outputs)
    noted = {key: value for key, value in group[0].meta.items() if key in ("is_backward", "in_grad_mode", "line")}
    call = made.call_function(region.target, ([copies[source] for source in boundary.inputs],))
    call.meta = {**noted, "val": [node.meta["val"] for node in boundary.outputs]}
    for i, node in enumerate(boundary.outputs):
        copies[node] = made.create_node("call_function", operator.getitem, (call, i), name=node.name)
        copies[node].meta = dict(node.meta)
    for node in boundary.views:
        copies[node] = made.node_copy(node, copies.__getitem__)

"""A region: a part of a graph as one operator, defined by the operators inside.

Its operator is `weft_region::<name>`, of one list of tensors to another, and the name holds a hash of what is inside:
equal regions are one operator, whichever graph they come from. Called as it is, it runs the operators inside one by
one. So whoever knows nothing of regions (a capture, a gradient, an executor) runs them right; compiling them is up to
those who do.
"""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.ir.interpreter import replay
from weft.graph.ir.source_text import argument_text, literal, name_of
from weft.operators import Cost, cost_of, register_cost, tensor_bytes

__all__ = ["NAMESPACE", "Region", "make_region", "region_of"]

NAMESPACE = "weft_region"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_known: dict[str, "Region"] = {}


@dataclass(frozen=True, eq=False)
class Region:
    """Operators that are run as one.

    Args:
        nodes: a placeholder for each input, calls, and one output node that holds a flat tuple.
        text: what is inside, one operator a line; equal for regions that compute the same in the same way.
    """

    name: str
    nodes: fx.Graph = field(repr=False)
    text: str = field(repr=False)

    @property
    def target(self) -> Any:
        """The operator."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors without values, of the shapes, strides and types that the region takes."""
        return [node.meta["val"] for node in self.nodes.nodes if node.op == "placeholder"]

    @property
    def output_nodes(self) -> list[fx.Node]:
        values: Any = self.nodes.output_node().args[0]
        return list(values)

    @property
    def outputs(self) -> list[Tensor]:
        return [node.meta["val"] for node in self.output_nodes]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The operators inside, one by one."""
        return list(replay(self.nodes, inputs, _no_constants)[self.nodes.output_node()])


def region_of(target: Any) -> Region | None:
    """The region behind an operator; None for one that is none."""
    if getattr(target, "namespace", "") != NAMESPACE:
        return None
    return _known.get(str(target).split(".")[1])


def make_region(members: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Region:
    """The region of these nodes, in their order; the one that is there already if there is an equal one."""
    nodes = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, source in enumerate(inputs):
        copies[source] = nodes.placeholder(f"in{i}")
        copies[source].meta = {"val": source.meta["val"]}
    for i, node in enumerate(members):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = nodes.create_node("call_function", node.target, args, kwargs, name=f"v{i}")
        copies[node].meta = {"val": node.meta["val"]}
    nodes.output(tuple(copies[node] for node in outputs))
    text = _text_of(nodes)
    name = _name_of(members, text)
    if name not in _known:
        _known[name] = Region(name, nodes, text)
        _define(_known[name])
    return _known[name]


def _define(region: Region) -> None:
    _library.define(f"{region.name}(Tensor[] inputs) -> Tensor[]")
    _library.impl(region.name, region.run, "CompositeImplicitAutograd")
    cost = _cost_of(region)
    if cost is not None:
        register_cost(region.target.overloadpacket, lambda inputs: cost)


def _cost_of(region: Region) -> Cost | None:
    """The operations of all inside, and the bytes of what goes in and out."""
    flops = 0
    for node in region.nodes.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            cost = cost_of(node.target, args, kwargs, node.meta["val"])
            if cost is None:
                return None
            flops += cost.flops
    return Cost(flops, tensor_bytes(*region.inputs), tensor_bytes(*region.outputs))


def _name_of(members: Sequence[fx.Node], text: str) -> str:
    """`add_mul_3f2a...`: the first few operators, and a hash of all."""
    calls = (node for node in members if node.target is not operator.getitem)
    kinds = dict.fromkeys(name_of(node.target).split(".")[1].strip("_") for node in calls)
    return f"{'_'.join(list(kinds)[:3])}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _text_of(nodes: fx.Graph) -> str:
    lines = []
    for node in nodes.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {_type_of(node.meta['val'])}")
        elif node.op == "call_function":
            lines.append(f"{node.name}: {_type_of(node.meta['val'])} = {_call_of(node)}")
        else:
            lines.append(f"return {literal(node.args[0])}")
    return "\n".join(lines)


def _call_of(node: fx.Node) -> str:
    target = "getitem" if node.target is operator.getitem else node.target
    return f"{target}({argument_text(node.args, node.kwargs)})"


def _type_of(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type_of, value))})"
    if value is None:
        return "None"
    strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"


def _no_constants(name: str) -> Any:
    raise AssertionError(f"a region holds no constants ({name})")

"""The linear layers at the end of a model, and what lies between them.

    conv - relu - pool - flatten - linear - relu - dropout - linear - norm - linear - (output)
                                   `-------- joint -------'`------- no joint ----'
                                   <----------------------- the tail --------------->

Between two layers of a chain activations may stay in parts where all that happens there is elementwise (a joint). A
model that cannot be traced is read along its nn.Sequential.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from weft.distributed.placement.tracing import ELEMENTWISE_LAYERS, is_elementwise, layer_of, trace

__all__ = ["Joint", "Link", "find_links", "tail_of"]

OF_EACH_SAMPLE: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.LayerNorm, nn.Softmax, nn.LogSoftmax)
"""Layers that may lie between linear ones of a tail, with activations as each rank has them."""


@dataclass(frozen=True)
class Joint:
    """The way from a linear layer to the next, where all on it is elementwise: its dropout layers, by name."""

    dropouts: tuple[str, ...] = ()


@dataclass
class Link:
    """A linear layer, by name: the layer that it follows, and the joint between them; None where there is none."""

    name: str
    follows: str | None = None
    joint: Joint | None = None
    is_last: bool = False  # nothing but layers of a tail between it and the model's output


@dataclass
class _Seen:
    """Things that a walk back from a linear layer has met."""

    dropouts: list[str] = field(default_factory=list)
    is_elementwise: bool = True


def find_links(module: nn.Module) -> list[Link]:
    """Every linear layer that is called once, in the order of calls."""
    graph = trace(module)
    if graph is None:
        return _links_of_sequences(module)
    layers = dict(module.named_modules())
    calls = [node for node in graph.nodes if node.op == "call_module"]
    counts: dict[str, int] = {}
    for node in calls:
        counts[node.target] = counts.get(node.target, 0) + 1
    links = {node: Link(node.target) for node in calls if is_linear(layers[node.target]) and counts[node.target] == 1}
    for node, link in links.items():
        seen = _Seen()
        before = _walk_back(node.args[0] if node.args else None, layers, seen)
        if before in links:
            link.follows = links[before].name
            link.joint = Joint(tuple(seen.dropouts)) if seen.is_elementwise else None
    output = next(node for node in graph.nodes if node.op == "output")
    last = _walk_back(output.args[0], layers, _Seen(), is_output=True)
    if last in links:
        links[last].is_last = True
    return list(links.values())


def tail_of(links: list[Link]) -> list[str]:
    """The names of the linear layers at the end, in the order of calls."""
    by_name = {link.name: link for link in links}
    found: list[str] = []
    link = next((link for link in links if link.is_last), None)
    while link is not None:
        found.append(link.name)
        link = by_name.get(link.follows) if link.follows is not None else None
    return found[::-1]


def is_linear(layer: nn.Module) -> bool:
    """One that can be split: no subclass, whose forward may be another, and without hooks or parametrizations."""
    return type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def _walk_back(node: Any, layers: Mapping[str, nn.Module], seen: _Seen, *, is_output: bool = False) -> Any:
    """The first node on the way back that is not of a tail: a linear layer, as a rule. A value that others use as well
    is as each rank has it."""
    while isinstance(node, fx.Node):
        if len(node.users) > 1:
            seen.is_elementwise = False
        layer = layer_of(node, layers)
        if isinstance(layer, nn.Dropout):
            seen.dropouts.insert(0, str(node.target))
        elif isinstance(layer, OF_EACH_SAMPLE):
            seen.is_elementwise = False
        elif layer is None and is_output and node.op in ("call_function", "call_method"):
            pass  # whatever a model does with its outputs, it does with those of its own samples
        elif not is_elementwise(node, layers) or len(node.all_input_nodes) != 1:
            return node
        node = node.args[0] if node.args else None
    return None


def _links_of_sequences(module: nn.Module) -> list[Link]:
    """Of a model that is not traced: neighbours in an nn.Sequential follow each other; nothing is known to be last but
    the layers of the last sequence that has some."""
    links: dict[str, Link] = {}
    for prefix, sequence in module.named_modules():
        if isinstance(sequence, nn.Sequential):
            links.update(_links_of(prefix, sequence))
    if links:
        links[list(links)[-1]].is_last = True
    alone = {name: Link(name) for name, layer in module.named_modules() if is_linear(layer) and name not in links}
    return [*alone.values(), *links.values()]


def _links_of(prefix: str, sequence: nn.Sequential) -> Iterator[tuple[str, Link]]:
    before: str | None = None
    seen = _Seen()
    for key, layer in sequence.named_children():
        name = f"{prefix}.{key}" if prefix else key
        if is_linear(layer):
            joint = Joint(tuple(seen.dropouts)) if before is not None and seen.is_elementwise else None
            yield name, Link(name, before, joint)
            before, seen = name, _Seen()
        elif isinstance(layer, nn.Dropout):
            seen.dropouts.append(name)
        elif isinstance(layer, OF_EACH_SAMPLE):
            seen.is_elementwise = False
        elif not isinstance(layer, ELEMENTWISE_LAYERS):
            before, seen = None, _Seen()

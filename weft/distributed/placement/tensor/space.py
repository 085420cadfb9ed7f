"""Pictures cut by rows over ranks: which layers take rows, and where rows become whole pictures again.

    rules     "features" -> "space"

    input -- [conv] -- relu -- [norm] -- relu -- [pool] -- flatten -- linear -- (output)
             cuts      rows stay rows            gathers

A value is in rows where all that use it take rows, or are elementwise and have nothing but rows; one that anything else
uses (flatten, a global mean, a sum with a whole picture) is gathered by the layer that made it. Weights are whole on
every rank, and their gradients, each of some rows, are added up along the axis `tensor`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import final

from torch import Tensor, fx, nn

from weft.distributed.placement.forwards import replace_forward
from weft.distributed.placement.rules import Rules
from weft.distributed.placement.tensor.region import Region
from weft.distributed.placement.tensor.space_layers import SpaceLayer, is_supported
from weft.distributed.placement.tracing import inputs_of, is_elementwise, layer_of, trace
from weft.errors import PlanError

__all__ = ["SPACE", "split_space"]

SPACE = "space"
"""The word of the rule."""


def split_space(module: nn.Module, region: Region, rules: Rules) -> frozenset[str]:
    """Let the layers with the rule `space` take rows of pictures, in place; the names of their parameters.

    Raises:
        PlanError: a layer cannot take rows, or the model cannot be traced.
    """
    layers = dict(module.named_modules())
    ruled = _ruled(layers, rules)
    if not ruled:
        return frozenset()
    graph = trace(module)
    if graph is None:
        raise PlanError(f"model cannot be traced, to split it by rows ({type(module).__name__}); use another rule")
    rows = _Rows(graph, layers, ruled)
    if not rows.layers():
        raise PlanError(f"no layer with the rule is called just once ({', '.join(sorted(ruled))}); use another rule")
    made: dict[fx.Node, SpaceLayer] = {}
    for node in rows.layers():
        first = inputs_of(node)[0]
        source = made[next(rows.origins(first))] if first in rows.values else None
        made[node] = SpaceLayer(region, source, gathers=node not in rows.values)
        replace_forward(layers[str(node.target)], partial(_forward, made[node]))
    names = {str(node.target) for node in made}
    return frozenset(f"{name}.{key}" for name in names for key, _ in layers[name].named_parameters())


def _forward(space: SpaceLayer, layer: nn.Module, x: Tensor) -> Tensor:
    return space.forward(layer, x)


def _ruled(layers: Mapping[str, nn.Module], rules: Rules) -> set[str]:
    """The layers that are to take rows. Others that a glob fits are passed over, but not one that is named."""
    ruled = {name for name, layer in layers.items() if is_supported(layer) and rules.word_of(name) == SPACE}
    for glob, word in rules.rows:
        if word == SPACE and glob in layers and not any(name == glob or name.startswith(f"{glob}.") for name in ruled):
            what = f"{glob}: {type(layers[glob]).__name__}"
            raise PlanError(f"layer cannot be split by rows of pictures ({what}); split it by another rule")
    rules.check_names(SPACE, ruled)
    return ruled


@final
class _Rows:
    """The values of a graph that are in rows.

    Args:
        ruled: names of layers that take rows.
    """

    def __init__(self, graph: fx.Graph, layers: Mapping[str, nn.Module], ruled: set[str]) -> None:
        self._graph = graph
        self._layers = layers
        calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        self._takers = {
            node
            for node in graph.nodes
            if node.op == "call_module" and node.target in ruled and calls.count(str(node.target)) == 1
        }
        self.values: set[fx.Node] = set()
        whole: set[fx.Node] = set()  # layers that must gather
        while True:
            found = self._spread(whole)
            if found <= whole:
                return
            whole |= found

    def _spread(self, whole: set[fx.Node]) -> set[fx.Node]:
        """Values in rows, where these layers gather; the layers that turn out to have to."""
        self.values = set()
        found: set[fx.Node] = set()
        for node in self._graph.nodes:
            in_rows = [value for value in inputs_of(node) if value in self.values]
            if node in self._takers:
                self.values |= {node} - whole
            elif in_rows and len(in_rows) == len(inputs_of(node)) and is_elementwise(node, self._layers):
                self.values.add(node)
            else:
                found |= {origin for value in in_rows for origin in self.origins(value)}
        return found

    def origins(self, value: fx.Node) -> Iterator[fx.Node]:
        """The layers that made a value in rows, through elementwise calls; they have as many rows as it has."""
        if value in self._takers or self._is_dropout(value):
            yield value
        if value not in self._takers:
            for before in inputs_of(value):
                yield from self.origins(before)

    def layers(self) -> list[fx.Node]:
        """Calls of layers that take rows, in their order; dropout among them, where it has rows."""
        dropouts = [node for node in self._graph.nodes if node in self.values and self._is_dropout(node)]
        return [node for node in self._graph.nodes if node in self._takers or node in dropouts]

    def _is_dropout(self, node: fx.Node) -> bool:
        return isinstance(layer_of(node, self._layers), nn.Dropout)

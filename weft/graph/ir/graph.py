"""A training step as one graph: operators that own variables, over an FX graph of ATen operators.

        state  batch            inputs: one placeholder for each tensor
           \\   /
          operators             call_function nodes; getitem nodes are no operators but name one output of several
           /   \\
     outputs  new state         results: places in a tree

The FX graph is never edited in place: a pass copies it (`graph.edited()`), edits the copy and makes a new Graph.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx

from weft.graph.ir.operator_roles import roles_of
from weft.graph.ir.pytree import Tree, paths_of
from weft.graph.ir.side_effects import is_random
from weft.graph.ir.source_text import name_of
from weft.graph.ir.symbolic_sizes import Condition, Size, places_of, shape_of

__all__ = ["Graph", "Operator", "Role", "Variable", "outputs_of", "owner_of"]

Role = Literal["state", "batch", "constant", "forward", "backward", "update", "communication"]


@dataclass(frozen=True, eq=False)
class Variable:
    """A value of the graph: an input, a constant, or an output of its owner."""

    name: str
    owner: "Operator | None"
    shape: tuple[int | Size, ...]
    dtype: torch.dtype | None  # None for what is no tensor
    role: Role
    path: str = ""  # of an input: `state.parameters.0.weight`
    readers: tuple["Operator", ...] = field(default=(), repr=False)


@dataclass(frozen=True, eq=False)
class Operator:
    """One call: what it reads, what it makes, which part of the step it is, and the line that asked for it."""

    name: str
    target: str  # `aten.addmm`
    role: Role
    line: str  # `model.py:12`, empty where unknown
    node: fx.Node = field(repr=False)
    inputs: tuple[Variable, ...] = field(default=(), repr=False)
    outputs: tuple[Variable, ...] = field(default=(), repr=False)


@dataclass(frozen=True, eq=False)
class Graph:
    """`(state, batch) -> (outputs, new state)` as operators.

    Args:
        nodes: placeholders, constants (get_attr), calls, one output node that holds a flat tuple.
        arguments: where each placeholder stands in `(state, batch)`.
        results: where each item of the output tuple stands in `(outputs, state)`.
        constants: the values of the get_attr nodes, by name.
        conditions: what must hold of named sizes.
    """

    nodes: fx.Graph = field(repr=False)
    arguments: Tree = field(repr=False)
    results: Tree = field(repr=False)
    constants: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    conditions: tuple[Condition, ...] = field(default=(), repr=False)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.nodes.nodes if node.op == "placeholder"]

    @property
    def result_nodes(self) -> tuple[Any, ...]:
        """The items of the output node, in the order of `results`: nodes, or None and numbers."""
        (values,) = self.nodes.output_node().args
        return tuple(values)  # type: ignore[arg-type]

    @property
    def outputs(self) -> dict[str, str]:
        """The variable behind each output, by path: `{"loss": "mse_loss"}`."""
        return self._results_under("outputs")

    @property
    def updates(self) -> dict[str, str]:
        """The variable that each place of the state becomes; one that stays as it is stands for itself."""
        return self._results_under("state")

    @cached_property
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        """The source of each named size: place of an argument, dimension."""
        return places_of([node.meta["val"] for node in self.placeholders])

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """The calls, in the order in which they run."""
        return self._view[0]

    @cached_property
    def variables(self) -> Mapping[str, Variable]:
        """Every value by name: inputs and constants first, then outputs in the order in which they are made."""
        return self._view[1]

    @cached_property
    def uses_random(self) -> bool:
        """Whether anything is drawn from the random state."""
        return any(is_random(node) for node in self.nodes.nodes)

    def edited(self) -> "Graph":
        """A copy whose FX graph may be edited, then handed on."""
        nodes = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        nodes.output(nodes.graph_copy(self.nodes, copies))
        return replace(self, nodes=nodes)

    @cached_property
    def _view(self) -> tuple[tuple[Operator, ...], dict[str, Variable]]:
        return _view_of(self)

    def _results_under(self, part: str) -> dict[str, str]:
        nodes, found = self.result_nodes, {}
        for path, place in paths_of(self.results):
            first, _, rest = path.partition(".")
            if first == part:
                found[rest] = str(nodes[place])
        return found


def owner_of(node: fx.Node) -> fx.Node:
    """The call that makes a value: the node itself, or that of which it is one output."""
    if node.target is not operator.getitem:
        return node
    assert isinstance(node.args[0], fx.Node)
    return node.args[0]


def outputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that take one output each of a call with several; empty for other nodes."""
    return [user for user in node.users if user.target is operator.getitem]


def _view_of(graph: Graph) -> tuple[tuple[Operator, ...], dict[str, Variable]]:
    shown = set(graph.outputs.values())
    roles = roles_of(graph.nodes, {node for node in graph.nodes.nodes if node.name in shown})
    paths = {leaf: path for path, leaf in reversed(list(paths_of(graph.arguments)))}
    operators: list[Operator] = []
    variables: dict[str, Variable] = {}
    readers: dict[str, list[Operator]] = {}
    for node in graph.nodes.nodes:
        if node.op == "placeholder":
            path = paths[len(variables)]
            variables[node.name] = _variable(node, None, "state" if path.startswith("state") else "batch", path)
        elif node.op == "get_attr":
            variables[node.name] = _variable(node, None, "constant")
        elif node.op == "call_function" and node.target is not operator.getitem:
            inputs = tuple(variables[source.name] for source in node.all_input_nodes)
            line = node.meta.get("line", "")
            made = Operator(node.name, name_of(node.target), roles[node], line, node, inputs)
            outputs: list[Any] = outputs_of(node) or [node]
            outputs.sort(key=lambda user: user.args[1] if user is not node else 0)
            owned = tuple(_variable(output, made, roles[node]) for output in outputs)
            object.__setattr__(made, "outputs", owned)  # operator and outputs know each other: one must come second
            variables.update((variable.name, variable) for variable in owned)
            operators.append(made)
            for variable in inputs:
                readers.setdefault(variable.name, []).append(made)
    for name, variable in variables.items():
        object.__setattr__(variable, "readers", tuple(readers.get(name, ())))
    return tuple(operators), variables


def _variable(node: fx.Node, owner: Operator | None, role: Role, path: str = "") -> Variable:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return Variable(node.name, owner, shape_of(value), value.dtype, role, path)
    return Variable(node.name, owner, (), None, role, path)

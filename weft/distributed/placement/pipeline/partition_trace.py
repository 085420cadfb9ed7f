"""The calls of a forward pass by torch.fx, which needs no batch: for lists of modules, and models without decisions."""

import inspect
import operator
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import fx, nn

from weft.distributed.placement.pipeline.partition_calls import Attribute, Call, Capture, Value
from weft.distributed.placement.pipeline.stages import INPUT
from weft.errors import GraphError

__all__ = ["trace"]


def trace(module: nn.Module, blocks: Mapping[str, nn.Module]) -> Capture:
    """The calls of the module in its present mode. Its inputs are the arguments of `forward` that have no default.

    Raises:
        GraphError: the forward pass decides by its inputs.
    """
    given = inspect.signature(module.forward).parameters.values()
    fixed = {p.name: p.default for p in given if p.default is not inspect.Parameter.empty}
    try:
        graph = _Tracer(blocks).trace(module, concrete_args=fixed or None)
    except Exception as error:
        what = f"{type(module).__name__}: {error}".splitlines()[0]
        raise GraphError(f"model cannot be cut without a batch to run it on ({what}); give sample inputs") from error
    nodes = _Nodes(fixed)
    for node in graph.nodes:
        nodes.add(node)
    return Capture(tuple(nodes.calls), nodes.output, frozenset(nodes.numbers), {})


@final
class _Tracer(fx.Tracer):
    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._blocks = {id(block) for block in blocks.values()}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._blocks


@final
class _Nodes:
    """From nodes of fx, in their order, to calls."""

    def __init__(self, fixed: Mapping[str, Any]) -> None:
        self.calls: list[Call] = []
        self.output: Any = None
        self.numbers: set[str] = set()
        self._fixed = fixed
        self._found: dict[fx.Node, Any] = {}
        self._num_inputs = 0

    def add(self, node: fx.Node) -> None:
        args = self._arguments(node.args)
        kwargs = self._arguments(node.kwargs)
        if node.op == "placeholder":
            self._found[node] = self._input(str(node.target))
        elif node.op == "get_attr":
            self._found[node] = Attribute(str(node.target))
        elif node.op == "output":
            self.output = args[0]
        else:
            target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
            value = Value(f"value/{len(self.calls)}/0")
            self._found[node] = value
            self.calls.append(Call(target, (args, kwargs), (value.id,), is_object=True))
            if self._is_number(node):
                self.numbers.add(value.id)

    def _input(self, name: str) -> Any:
        for argument, default in self._fixed.items():
            if name == argument or name.startswith(f"{argument}_"):
                return default
        self._num_inputs += 1
        return Value(f"{INPUT}{self._num_inputs - 1}")

    def _arguments(self, structure: Any) -> Any:
        return fx.node.map_arg(structure, self._found.__getitem__)

    def _is_number(self, node: fx.Node) -> bool:
        """Whether it is a size, or computed of sizes: `x.size(0)`, `x.shape[0]`, `x.shape[0] * 2`."""
        inner = node.all_input_nodes
        if node.op == "call_method":
            return node.target in ("dim", "numel") or (node.target == "size" and len(node.args) > 1)
        if node.target is operator.getitem and inner:
            return _is_shape(inner[0])
        is_operation = getattr(node.target, "__module__", "") in ("_operator", "operator")
        return is_operation and all(isinstance(v := self._found.get(n), Value) and v.id in self.numbers for n in inner)


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1
    return node.target is getattr and node.args[1:] == ("shape",)

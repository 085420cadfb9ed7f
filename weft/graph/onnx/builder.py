"""Nodes of an ONNX graph, added one after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, fx

from weft.graph.onnx.tensor_types import onnx_type

__all__ = ["OPSET", "Builder", "Export", "Input", "value_of"]

OPSET = 20
"""Gelu came in 20; ONNX Runtime reads newer ones too."""

IR_VERSION = 10

Input = fx.Node | str | None
"""A node of the captured graph, a name in the ONNX graph, or an input that is left out."""


Export = Callable[..., str | Sequence[str | None]]
"""`(builder, node, *args, **kwargs)` adds nodes for one operator, with the arguments of ATen, and names its outputs."""


def value_of(node: fx.Node) -> Tensor:
    """A tensor without values that has the type and shape of a node's value, of the first where there are several."""
    value = node.meta["val"]
    first: Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return first


class Builder:
    """`builder("Add", x, y)` adds a node and gives the name of its output."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[TensorProto] = []
        self._names: dict[fx.Node, str | Sequence[str | None]] = {}
        self._count = 0

    def __call__(self, kind: str, *inputs: Input, **attributes: Any) -> str:
        (name,) = self.several(kind, 1, *inputs, **attributes)
        return name

    def several(self, kind: str, num_outputs: int, *inputs: Input, **attributes: Any) -> list[str]:
        """A node with more outputs than one."""
        names = [self._fresh(kind.lower()) for _ in range(num_outputs)]
        given = [self.name(value) for value in inputs]
        while given and given[-1] == "":  # optional inputs at the end are left out
            given.pop()
        used = {key: value for key, value in attributes.items() if value is not None}
        self._nodes.append(helper.make_node(kind, given, names, **used))
        return names

    def name(self, value: Input) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        found = self._names[value]
        assert isinstance(found, str), f"{value} has several outputs"
        return found

    def define(self, node: fx.Node, names: str | Sequence[str | None]) -> None:
        """Say what a captured node is called here; a sequence for one with several outputs."""
        self._names[node] = names

    def output_of(self, node: fx.Node, index: int) -> str:
        found = self._names[node][index]
        assert found is not None, f"output {index} of {node} was said to have no reader"
        return found

    def constant(self, values: Any, dtype: torch.dtype = torch.int64) -> str:
        """A tensor that is part of the file; `values` is a number, a nested list or a tensor."""
        name = self._fresh("constant")
        tensor = torch.as_tensor(values, dtype=None if isinstance(values, Tensor) else dtype)
        self._constants.append(numpy_helper.from_array(_array(tensor), name))
        return name

    def store(self, name: str, tensor: Tensor) -> None:
        """Let a tensor of the state be part of the file, under its own name."""
        self._constants.append(numpy_helper.from_array(_array(tensor), name))

    def cast(self, value: Input, dtype: torch.dtype) -> Input:
        """The value in a type; as it is where it has that type already."""
        if isinstance(value, fx.Node) and value.meta["val"].dtype == dtype:
            return value
        return self("Cast", value, to=onnx_type(dtype))

    def model(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, tuple[str, Tensor]]) -> onnx.ModelProto:
        """The finished model. Of inputs and outputs, tensors tell type and shape; outputs also name what they show."""
        shown = [helper.make_node("Identity", [source], [name]) for name, (source, _) in outputs.items()]
        graph = helper.make_graph(
            [*self._nodes, *shown],
            "weft",
            [_described(name, tensor) for name, tensor in inputs.items()],
            [_described(name, tensor) for name, (_, tensor) in outputs.items()],
            self._constants,
        )
        imports = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="weft")

    def _fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"


def _described(name: str, tensor: Tensor) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx_type(tensor.dtype), [int(size) for size in tensor.shape])


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(tuple(tensor.shape))

"""An ONNX model as a module: its initializers are parameters and buffers, its nodes run in their order."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import onnx
from onnx import helper
from torch import Tensor, nn

from weft.errors import CorruptFileError, GraphError, nearest
from weft.graph.onnx import import_elementwise, import_products, import_reductions, import_shapes
from weft.graph.onnx.import_operator import ImportedOperator
from weft.graph.onnx.tensor_types import tensor_of

__all__ = ["IMPORTS", "OnnxModule", "from_onnx", "load"]

IMPORTS: Mapping[str, ImportedOperator] = {
    **import_elementwise.TABLE,
    **import_reductions.TABLE,
    **import_shapes.TABLE,
    **import_products.TABLE,
}
"""Operators that an imported model may be made of."""

_NORM = "BatchNormalization"
_OLDEST = 7  # operator set: before, broadcasting was asked for by attributes


def load(file: Path) -> "OnnxModule":
    """Read an ONNX file of operators in `IMPORTS`.

    Raises:
        CorruptFileError: the file is no ONNX model.
        GraphError: the model has an operator that is not in the table, or stores tensors outside the file.
    """
    try:
        model = onnx.load_model(str(file), load_external_data=False)
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf and onnx have many, of no common kind
        raise CorruptFileError(f"file is not an ONNX model ({file}: {error}); export it again") from error
    return from_onnx(model)


def from_onnx(model: onnx.ModelProto) -> "OnnxModule":
    """The same from a model in memory."""
    version = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if version < _OLDEST:
        raise GraphError(f"ONNX model is too old (operator set: {version}, oldest: {_OLDEST}); export it again")
    for node in model.graph.node:
        if node.op_type not in IMPORTS or node.domain not in ("", "ai.onnx"):
            name = node.op_type if not node.domain else f"{node.domain}.{node.op_type}"
            cure = nearest(node.op_type, IMPORTS)
            raise GraphError(f"ONNX operator is not in the table (operator: {name}, node: {node.name or '-'}); {cure}")
    return OnnxModule(model)


@final
class OnnxModule(nn.Module):
    """Called with the model's inputs in their order; returns its output, or a tuple of several.

    Floating-point initializers are parameters, all others and the statistics of batch norm are buffers. They are called
    as in the file, with dots and slashes as underscores.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        stored = {tensor.name: tensor_of(tensor) for tensor in model.graph.initializer}
        self._inputs = [described.name for described in model.graph.input if described.name not in stored]
        self._outputs = [described.name for described in model.graph.output]
        self._steps = [_Step(node) for node in model.graph.node]
        self._numbers: dict[str, list[int]] = {}
        self._places: dict[str, str] = {}
        running = {name for node in model.graph.node if node.op_type == _NORM for name in node.input[3:5]}
        for name, tensor in stored.items():
            self._store(name, tensor, is_trained=tensor.is_floating_point() and name not in running)

    def _store(self, name: str, tensor: Tensor, *, is_trained: bool) -> None:
        place = "_".join("".join(c if c.isalnum() else " " for c in name).split()) or "unnamed"
        while hasattr(self, place):
            place += "_"
        if is_trained:
            self.register_parameter(place, nn.Parameter(tensor))
        else:
            self.register_buffer(place, tensor)
        if not tensor.is_floating_point():
            self._numbers[name] = tensor.flatten().tolist()
        self._places[name] = place

    def forward(self, *inputs: Tensor) -> Any:
        if len(inputs) != len(self._inputs):
            wanted = ", ".join(self._inputs)
            raise GraphError(f"model takes other inputs (given: {len(inputs)}, wanted: {wanted}); pass them in order")
        values: dict[str, Tensor | None] = {name: getattr(self, place) for name, place in self._places.items()}
        values |= dict(zip(self._inputs, inputs, strict=True))
        numbers = dict(self._numbers)
        for step in self._steps:
            for name, value in step.run(values, numbers):
                values[name] = value
        found = [values[name] for name in self._outputs]
        return found[0] if len(found) == 1 else tuple(found)


class _Step:
    """One node: its function, its attributes, the names it reads and makes."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self._kind = node.op_type
        self._definition = IMPORTS[node.op_type]
        self._inputs, self._outputs = list(node.input), list(node.output)
        self._attributes: dict[str, Any] = {a.name: _attribute(a) for a in node.attribute}
        if node.op_type == "Split":
            self._attributes["outputs"] = len(node.output)

    def run(
        self, values: dict[str, Tensor | None], numbers: dict[str, list[int]]
    ) -> Iterator[tuple[str, Tensor | None]]:
        given: list[Any] = []
        for place, name in enumerate(self._inputs):
            value = values[name] if name else None
            if place in self._definition.static and value is not None:
                # Known without looking at the tensor where it is stored, so that the module can be captured.
                given.append(numbers[name] if name in numbers else value.flatten().tolist())
            else:
                given.append(value)
        made = self._definition.function(self._attributes, *given)
        results: Sequence[Tensor | None] = [made] if isinstance(made, Tensor) else made
        for place, name in enumerate(self._outputs):
            if name:
                value = results[place] if place < len(results) else None
                if value is None:
                    raise GraphError(f"ONNX operator has an output that is not made here ({self._kind}: {name})")
                self._note(numbers, name, value)
                yield name, value

    def _note(self, numbers: dict[str, list[int]], name: str, value: Tensor | None) -> None:
        """Constants and shapes are numbers too."""
        if self._kind == "Constant" and value is not None and not value.is_floating_point():
            numbers[name] = value.flatten().tolist()


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value

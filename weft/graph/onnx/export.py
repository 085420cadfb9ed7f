"""From a captured forward graph to an ONNX file."""

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from torch import Tensor, fx, nn
from torch.func import functional_call

from weft.atomic import write_bytes
from weft.errors import GraphError
from weft.graph.capture.capture import capture
from weft.graph.ir.graph import Graph
from weft.graph.ir.pytree import flatten_as, paths_of
from weft.graph.onnx.builder import Builder
from weft.graph.onnx.export_table import EXPORTS
from weft.graph.rewrites import rewrite

__all__ = ["check_exportable", "export", "graph_to_onnx", "output_name", "to_onnx"]


def export(module: nn.Module, inputs: Sequence[Tensor], file: Path) -> None:
    """Write a module's forward pass, in evaluation mode, as an ONNX file for inputs of these shapes.

    Parameters and buffers are in the file under their own names; inputs are called `inputs.0`, the output `output`.

    Raises:
        GraphError: the module cannot be captured, or has an operator that is in no table; names its line.
    """
    write_bytes(file, to_onnx(module, inputs).SerializeToString())


def to_onnx(module: nn.Module, inputs: Sequence[Tensor]) -> onnx.ModelProto:
    """The model that `export` writes."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def step(tensors: Any, batch: Any) -> tuple[Any, Any]:
        return functional_call(module, tensors, tuple(batch["inputs"])), tensors

    was_training = module.training
    module.eval()
    try:
        tensors = {name: tensor.detach() for name, tensor in state.items()}
        graph = rewrite(capture(step, tensors, {"inputs": list(inputs)}))
    finally:
        module.train(was_training)
    return graph_to_onnx(graph, tensors)


def graph_to_onnx(graph: Graph, state: Any = None) -> onnx.ModelProto:
    """A forward graph as a model. Outputs are those of the graph; a new state, which inference has not, is left out.

    Args:
        state: what is stored in the file; None makes inputs of the state's tensors too.
    """
    check_exportable(graph)
    builder = Builder()
    stored = _stored(graph, state)
    inputs: dict[str, Tensor] = {}
    paths = {place: path for path, place in reversed(list(paths_of(graph.arguments)))}
    for place, node in enumerate(graph.placeholders):
        name = _input_name(paths[place], is_stored=place in stored)
        builder.define(node, name)
        if place in stored:
            builder.store(name, stored[place])
        else:
            inputs[name] = node.meta["val"]
    for node in graph.nodes.nodes:
        _add(builder, graph, node)
    outputs: dict[str, tuple[str, Tensor]] = {}
    for path, place in paths_of(graph.results):
        node = graph.result_nodes[place]
        if path.partition(".")[0] == "outputs" and isinstance(node, fx.Node):
            outputs[output_name(path)] = builder.name(node), node.meta["val"]
    return builder.model(inputs, outputs)


def check_exportable(graph: Graph) -> None:
    """Refuse a graph with an operator that has no ONNX form here, with its line."""
    for made in graph.operators:
        name = str(made.node.target)
        if name not in EXPORTS:
            where = f"operator: {name}, part: {made.role}, line: {made.line or 'unknown'}"
            raise GraphError(f"operator has no ONNX form here ({where}); only forward passes in evaluation mode do")


def _stored(graph: Graph, state: Any) -> dict[int, Tensor]:
    if state is None:
        return {}
    places = {place for path, place in paths_of(graph.arguments) if path.partition(".")[0] == "state"}
    tree = dict(graph.arguments[1])["state"]
    leaves = flatten_as(tree, state, len(graph.placeholders))
    return {place: leaves[place] for place in places}


def _input_name(path: str, *, is_stored: bool) -> str:
    """`0.weight` for what is stored; `inputs.0` for what is not."""
    return (path.partition(".")[2] or path) if is_stored or path.startswith("batch.") else path


def output_name(path: str) -> str:
    return path.partition(".")[2] or "output"


def _add(builder: Builder, graph: Graph, node: fx.Node) -> None:
    if node.op == "get_attr":
        builder.define(node, builder.constant(graph.constants[str(node.target)]))
    elif node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        builder.define(node, builder.output_of(source, index))
    elif node.op == "call_function":
        builder.define(node, EXPORTS[str(node.target)](builder, node, *node.args, **node.kwargs))

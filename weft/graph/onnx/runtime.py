"""A forward graph run by ONNX Runtime, and the executor that evaluates with it."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from weft.errors import UsageError
from weft.graph.executors.executor import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.graph.executors.graph_executor import GraphExecutor
from weft.graph.ir.graph import Graph
from weft.graph.ir.pytree import paths_of
from weft.graph.onnx.builder import Builder
from weft.graph.onnx.export import graph_to_onnx, output_name
from weft.graph.onnx.export_table import EXPORTS
from weft.graph.programs.program import AbstractProgram, Sink
from weft.specs import Batch

__all__ = ["OnnxProgram", "OnnxRuntimeExecutor"]

_ERRORS_ONLY = 3


class OnnxProgram(AbstractProgram):
    """A forward graph in ONNX Runtime, on the CPU. The state goes in with every call, so it may change between calls.

    Raises:
        GraphError: an operator has no ONNX form here; names its line.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._session = _Session(graph_to_onnx(graph))
        named = {place: output_name(path) for path, place in paths_of(graph.results) if path.startswith("outputs")}
        self._named = {place: name for place, name in named.items() if name in self._session.outputs}

    def step(self, inputs: Sequence[Tensor], sink: Sink) -> list[Any]:
        given = dict(zip(self.graph.placeholders, inputs, strict=True))
        found = self._session.run(inputs)
        return [
            found[self._named[place]] if place in self._named else given.get(node, node)
            for place, node in enumerate(self.graph.result_nodes)
        ]

    def compute(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        sources, tensors = node.all_input_nodes, dict[fx.Node, Tensor]()
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        fx.node.map_arg((node.args, node.kwargs), lambda source: tensors.setdefault(source, next(given)))
        builder = Builder()
        for source in sources:
            builder.define(source, source.name)
        made = EXPORTS[str(node.target)](builder, node, *node.args, **node.kwargs)
        names = [made] if isinstance(made, str) else list(made)
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        shown = {f"result_{i}": (n, v) for i, (n, v) in enumerate(zip(names, values, strict=False)) if n is not None}
        model = builder.model({source.name: tensors[source] for source in sources}, shown)
        found = _Session(model).run([tensors[source] for source in sources])
        results = [found.get(f"result_{i}") for i in range(len(names))]
        return results[0] if isinstance(made, str) else results


@final
class OnnxRuntimeExecutor(AbstractExecutor):
    """Evaluates a module with ONNX Runtime. It cannot train: ONNX Runtime computes no gradients."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self._inner = GraphExecutor(module, loss, make_program=lambda graph, _sunk: OnnxProgram(graph))

    def initial_state(self) -> State:
        return self._inner.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        raise UsageError(
            "ONNX Runtime computes no gradients (executor: onnxruntime); train with executor=graph, evaluate with this"
        )

    def infer(self, state: State, batch: Batch) -> Outputs:
        return self._inner.infer(state, batch)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return self._inner.first_bad_tensor(state, batch)

    def program(self, state: State, batch: Batch, *, is_training: bool = False) -> AbstractProgram:
        """The program that evaluates a batch of this shape."""
        assert not is_training
        return self._inner.program(state, batch, is_training=False)


class _Session:
    """A model loaded by ONNX Runtime."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.intra_op_num_threads = torch.get_num_threads()
        content, providers = model.SerializeToString(), ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(content, options, providers=providers)
        self.inputs = [described.name for described in model.graph.input]
        self.outputs = [described.name for described in model.graph.output]

    def run(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        given = {name: _array(tensor) for name, tensor in zip(self.inputs, inputs, strict=True)}
        found = self._session.run(self.outputs, given)
        return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(self.outputs, found, strict=True)}


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()

"""Calls of a model's layers as a graph, and which of them are elementwise.

For placements that ask what lies between layers. The graph is torch.fx's; whoever cannot have it goes by what modules
say of themselves.
"""

import operator
from collections.abc import Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import fx, nn

__all__ = ["ELEMENTWISE_LAYERS", "inputs_of", "is_elementwise", "layer_of", "trace"]

ELEMENTWISE_LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink),
    *(nn.Identity, nn.Dropout),
)
"""Dropout too: whoever keeps values in parts draws a mask of the whole."""

_FUNCTIONS = frozenset(
    {
        *(torch.relu, torch.tanh, torch.sigmoid, torch.abs, torch.square, operator.neg),
        *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.hardtanh, F.hardswish),
        *(F.tanh, F.sigmoid, F.softplus, F.softsign, F.logsigmoid),
        *(operator.add, operator.iadd, operator.sub, operator.mul, torch.add, torch.sub, torch.mul),
    }
)
_METHODS = frozenset({"relu", "relu_", "tanh", "sigmoid", "abs", "square", "contiguous", "add", "add_", "mul", "sub"})


def trace(module: nn.Module) -> fx.Graph | None:
    """The calls of a forward in their order; None of a model whose calls hang on its inputs."""
    try:
        return _Tracer().trace(module)
    except Exception:  # tracing runs the model's own code on stand-ins, which may fail in any way
        return None


@final
class _Tracer(fx.Tracer):
    """Calls of torch's own layers are nodes, and so are those of modules without layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or not any(True for _ in m.children())


def layer_of(node: Any, layers: Mapping[str, nn.Module]) -> nn.Module | None:
    """The layer that a node calls, if it calls one."""
    return layers[str(node.target)] if isinstance(node, fx.Node) and node.op == "call_module" else None


def inputs_of(node: fx.Node) -> list[fx.Node]:
    return list(node.all_input_nodes)


def is_elementwise(node: fx.Node, layers: Mapping[str, nn.Module]) -> bool:
    """Whether every value of its result is made from the values at the same place."""
    if node.op == "call_module":
        return isinstance(layer_of(node, layers), ELEMENTWISE_LAYERS)
    return (node.op == "call_function" and node.target in _FUNCTIONS) or (
        node.op == "call_method" and node.target in _METHODS
    )

"""Memory of values: which are views, which the caller gets to hold, how each is laid out."""

import operator

import torch
from torch import Tensor, fx

from weft.torch_private import schema_of

__all__ = ["PLAIN_VIEWS", "escaping", "fills_memory", "has_known_shape", "is_view", "layout_of"]

aten = torch.ops.aten

PLAIN_VIEWS = frozenset(
    {
        aten.alias.default,
        aten.as_strided.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view.dtype,
    }
)
"""Views that show elements as they are: not a conjugate or a negated one."""


def is_view(node: fx.Node) -> bool:
    """Whether the call gives a view of its input, by its schema."""
    schema = schema_of(node.target)
    return schema is not None and any(item.alias_info is not None for item in schema.returns)


def escaping(nodes: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory the caller gets to hold: the results, and what they are views of."""
    waiting = list(nodes.output_node().all_input_nodes)
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.target is operator.getitem or is_view(node):
            for source in node.all_input_nodes:
                if source not in found:
                    found.add(source)
                    waiting.append(source)
    return found


def has_known_shape(value: Tensor) -> bool:
    """Whether every size is a number, none a name."""
    return all(type(size) is int for size in (*value.shape, *value.stride()))


def fills_memory(value: Tensor) -> bool:
    """Whether a tensor is dense, without gaps and overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def layout_of(value: Tensor) -> tuple[tuple[str, ...], tuple[str, ...], torch.dtype]:
    """Shape, strides and type; sizes are texts, so that comparing symbolic ones decides nothing about them."""
    return tuple(map(str, value.shape)), tuple(map(str, value.stride())), value.dtype

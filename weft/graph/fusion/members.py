"""Members of regions: element-wise functions, norms and sums, and the views between them."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, fx

from weft.graph.ir.graph import owner_of
from weft.graph.ir.memory_layout import PLAIN_VIEWS, has_known_shape
from weft.graph.ir.side_effects import is_pure
from weft.torch_private import schema_of

__all__ = ["is_view_in_region", "members_of"]

aten = torch.ops.aten

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)
_VIEWS = PLAIN_VIEWS - {aten.as_strided.default}  # which looks past its input, at the memory behind it
_LARGEST_SUM_OF_ROWS = 1 << 16  # elements
# Element-wise, though PyTorch does not say so of them.
_ALSO = frozenset(
    {
        aten._to_copy.default,
        aten.full_like.default,
        aten.hardtanh_backward.default,
        aten.mse_loss_backward.default,
        aten.ones_like.default,
        aten.zeros_like.default,
    }
)
# Loops over a row or a channel that can take in what comes before and after them.
_REDUCTIONS = frozenset(
    {
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten._native_batch_norm_legit_functional.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten.amax.default,
        aten.mean.default,
        aten.mean.dim,
        aten.native_batch_norm_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.sum.default,
        aten.sum.dim_IntList,
    }
)


def members_of(nodes: fx.Graph) -> set[fx.Node]:
    """The calls that may be in regions. A view is one if what reads it is, an output of several if its owner is."""
    found: set[fx.Node] = set()
    for node in reversed(list(nodes.nodes)):
        if node.op != "call_function" or not _is_plain_call(node):
            continue
        if is_view_in_region(node):
            if any(user in found for user in node.users):
                found.add(node)
        elif _may_be_compiled(owner_of(node)):
            found.add(node)
    return found


def is_view_in_region(node: fx.Node) -> bool:
    """Whether the call is a look at memory, which a region may take at what it is given but never gives away."""
    return node.target in _VIEWS


def _may_be_compiled(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    if schema is None or schema.is_mutable or not is_pure(node):
        return False
    is_element_wise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _ALSO
    return (is_element_wise or node.target in _REDUCTIONS) and not _is_slower_compiled(node)


def _is_slower_compiled(node: fx.Node) -> bool:
    """Whether ATen's own kernel takes two thirds of the time, as measured on 512 x 512 floats and two threads."""
    if node.target in (aten.gelu.default, aten.gelu_backward.default):
        return node.kwargs.get("approximate", "none") == "none"
    if node.target is not aten.sum.dim_IntList:
        return False
    value, dims = node.all_input_nodes[0].meta["val"], cast(Sequence[int] | None, node.args[1])
    is_along_rows = not dims or -1 in dims or value.dim() - 1 in dims
    return not is_along_rows and value.numel() > _LARGEST_SUM_OF_ROWS


def _is_plain_call(node: fx.Node) -> bool:
    """On the CPU, of a type that the compiler knows, of a shape that is known; and so is all that it reads."""
    return all(_is_plain(item.meta.get("val")) for item in (node, *node.all_input_nodes))


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(part is None or _is_plain(part) for part in value)
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.dtype not in _TYPES:
        return False
    return has_known_shape(value)

"""Aliasing: the values in whose memory another may lie, by views and by operators of which little is known."""

import operator
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from weft.graph.fusion import region_of
from weft.graph.ir.memory_layout import is_view
from weft.graph.memory_plan.out_variants import is_pointwise, written_into

__all__ = ["is_alias", "owners_of", "owns_its_outputs"]

aten = torch.ops.aten

_UNSAID_VIEWS = (aten._unsafe_view.default, aten.lift_fresh.default)
# Each of their outputs is memory that nobody else holds, though they cannot be told where to put it.
_MAKERS = frozenset(
    {
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten.constant_pad_nd.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.nll_loss_forward.default,
        aten.select_backward.default,
        aten.slice_backward.default,
    }
)

# Their outputs are not in the memory of their inputs, though two of them may be one.
_NOT_THEIR_INPUTS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten.mkldnn_rnn_layer.default,
        aten.mkldnn_rnn_layer_backward.default,
    }
)


def is_alias(node: fx.Node) -> bool:
    """Whether the call gives a view, said to be one by its schema or not."""
    return node.op == "call_function" and (is_view(node) or node.target in _UNSAID_VIEWS)


def owns_its_outputs(node: fx.Node) -> bool:
    """Whether each output of a call is known to be memory of its own."""
    if node.op != "call_function" or node.target is operator.getitem or is_alias(node):
        return False
    is_region = region_of(node.target) is not None
    return is_region or node.target in _MAKERS or is_pointwise(node) or written_into(node) is not None


def owners_of(order: Iterable[fx.Node]) -> Mapping[fx.Node, frozenset[fx.Node]]:
    """The nodes in whose memory each value may lie. An operator that is not known may give back any of its inputs."""
    owners: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in order:
        sources = [owners[source] for source in node.all_input_nodes]
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            owners[node] = frozenset([node]) if owns_its_outputs(source) else owners[source]
        elif is_alias(node):
            owners[node] = sources[0]
        elif node.op == "call_function" and not owns_its_outputs(node) and node.target not in _NOT_THEIR_INPUTS:
            owners[node] = frozenset([node]).union(*sources)
        else:
            owners[node] = frozenset([node])
    return owners

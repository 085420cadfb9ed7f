"""The price of a call on this kind of machine, in bytes: those that it moves, and those that could move meanwhile.

Element-wise operators are bound by memory, products by arithmetic; a call costs something even on one number. The
three are put on one scale by what a core does in the same time, in round figures: they only have to say which of two
ways is shorter.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from weft.operators import cost_of, tensor_bytes
from weft.torch_private import size_hints

__all__ = ["price_of_call", "price_of_node"]

_BYTES_PER_CALL = 20_000  # 2 us at 10 GB/s
_BYTES_PER_FLOP = 0.2  # 50 GFLOP/s at 10 GB/s


def price_of_node(node: fx.Node) -> float:
    if node.op != "call_function" or node.target is operator.getitem:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return price_of_call(node.target, args, kwargs, node.meta["val"])


def price_of_call(target: Any, args: Sequence[Any], options: Mapping[str, Any], value: Any) -> float:
    """The price of one call, from shapes; symbolic sizes count as the ones that were captured."""
    args, options, value = fx.node.map_aggregate(
        (args, options, value), lambda item: size_hints(item) if isinstance(item, Tensor) else item
    )
    cost = cost_of(target, args, options, value)
    if cost is None:  # then it is taken for one that goes over its operands once
        tensors = [leaf for leaf in tree_leaves((args, options, value)) if isinstance(leaf, Tensor)]
        return _BYTES_PER_CALL + tensor_bytes(*tensors)
    if not cost.bytes_moved and not cost.flops:
        return _BYTES_PER_CALL / 2  # a view
    return _BYTES_PER_CALL + max(cost.bytes_moved, _BYTES_PER_FLOP * cost.flops)

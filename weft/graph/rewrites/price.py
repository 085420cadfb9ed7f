"""What a call costs on this kind of machine, in bytes: those that it moves, and those that could move meanwhile.

Element-wise operators are bound by memory, products by arithmetic; a call costs something even on one number. The
three are put on one scale by what a core does in the same time, in round figures: they only have to say which of two
ways is shorter.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from weft.operators import cost_of
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
    """From shapes alone; symbolic sizes count as the ones that were captured."""
    cost = cost_of(target, _concrete(args), _concrete(options), _concrete(value))
    if cost is None:
        return float("inf")
    if not cost.bytes_moved and not cost.flops:
        return _BYTES_PER_CALL / 2  # a view
    return _BYTES_PER_CALL + max(cost.bytes_moved, _BYTES_PER_FLOP * cost.flops)


def _concrete(value: Any) -> Any:
    if isinstance(value, Tensor):
        return size_hints(value)
    if isinstance(value, Mapping):
        return {key: _concrete(item) for key, item in value.items()}
    return type(value)(map(_concrete, value)) if isinstance(value, (tuple, list)) else value

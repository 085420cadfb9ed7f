"""Reductions in rank order with torch, bit for bit those of reduce.h: 16-bit floats in 32 bits, rounded once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.distributed.group.shared_memory.request import OPS, TYPES, Request

__all__ = ["reduce_in_order", "reduce_weighted"]

_DTYPES = {code: dtype for dtype, code in TYPES.items() if dtype != torch.bool}
_COMBINE: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    OPS["sum"]: torch.add,
    OPS["mean"]: torch.add,
    OPS["min"]: torch.minimum,
    OPS["max"]: torch.maximum,
    OPS["product"]: torch.mul,
}


def reduce_in_order(request: Request, parts: Sequence[Tensor]) -> Tensor:
    """((x0 op x1) op x2) ... of the ranks' bytes, as bytes."""
    dtype = _DTYPES[request.type]
    total = _widen(parts[0], dtype)
    for part in parts[1:]:
        total = _COMBINE[request.op](total, _widen(part, dtype))
    if request.op == OPS["mean"]:
        total = total / len(parts)
    return total.to(dtype).view(torch.uint8)


def reduce_weighted(request: Request, parts: Sequence[Tensor]) -> Tensor:
    """weights[0] parts[0] + weights[1] parts[1] + ..., as bytes."""
    dtype = _DTYPES[request.type]
    total = _widen(parts[0], dtype) * request.weights[0]
    for part, weight in zip(parts[1:], request.weights[1:], strict=True):
        total = total + _widen(part, dtype) * weight
    return total.to(dtype).view(torch.uint8)


def _widen(part: Tensor, dtype: torch.dtype) -> Tensor:
    values = part.view(dtype)
    return values.float() if dtype in (torch.bfloat16, torch.float16) else values

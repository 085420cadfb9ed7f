"""torch's reductions, as groups know them or as functions of two tensors."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.distributed.group.calls import ReduceOp
from weft.errors import UsageError

__all__ = ["Combine", "any_op_of", "op_of"]

Combine = Callable[[Tensor, Tensor], Tensor]

# By the numbers of torch's inner enumeration: its reductions are slow to compare, and its stubs do not know them.
_NAMES: dict[str, ReduceOp | Combine] = {
    "SUM": "sum",
    "AVG": "mean",
    "MIN": "min",
    "MAX": "max",
    "PRODUCT": "product",
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_OPS: dict[int, ReduceOp | Combine] = {getattr(dist.ReduceOp.RedOpType, name).value: op for name, op in _NAMES.items()}


def any_op_of(opts: Any) -> ReduceOp | Combine:
    """A reduction of groups, or a function of two tensors for one that they do not have."""
    if opts is None:
        return "sum"
    op = _OPS.get(opts.reduceOp.op.value)
    if op is None:
        raise _unknown(opts)
    return op


def op_of(opts: Any) -> ReduceOp:
    """A reduction of groups.

    Raises:
        UsageError: they do not have it.
    """
    op = any_op_of(opts)
    if not isinstance(op, str):
        raise _unknown(opts)
    return op


def _unknown(opts: Any) -> UsageError:
    return UsageError(
        f"shared memory does not know this reduction ({opts.reduceOp.op}); use sum, avg, min, max or product"
    )

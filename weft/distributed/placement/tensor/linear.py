"""Products with a part of a weight, whose gradients travel while the next product is computed.

    split by outputs (column)     y_r = x W_r + b_r       x is whole, y_r this rank's part
        backward                  dx_r = dy_r W_r^T       ======> all-reduce
                                  dW_r = x^T dy_r         meanwhile
    split by inputs (row)         y = sum_r x_r W_r + b   x_r is this rank's part, y whole
        backward                  dx_r, dW_r              nothing travels: all ranks have dy

W is [in, out] here; a layer of torch.nn holds it transposed.
"""

from typing import Any

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.tensor.collectives import start_sum

__all__ = ["column_conv", "column_linear", "row_linear"]


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: AbstractGroup, *, transposed: bool = True
) -> Tensor:
    """This rank's part of the outputs, from whole inputs of shape [..., in].

    Args:
        weight: this rank's part, [out / n, in], or [in, out / n] where it is not transposed.
        bias: this rank's part.
    """
    y: Tensor = _Column.apply(x, weight, bias, group, transposed)  # type: ignore[no-untyped-call]
    return y


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: AbstractGroup, *, transposed: bool = True
) -> Tensor:
    """Whole outputs, from this rank's part of the inputs, of shape [..., in / n].

    Args:
        weight: this rank's part, [out, in / n], or [in / n, out] where it is not transposed.
        bias: whole; added once.
    """
    y: Tensor = _Row.apply(x, weight, bias, group, transposed)  # type: ignore[no-untyped-call]
    return y


def column_conv(layer: Any, x: Tensor, group: AbstractGroup) -> Tensor:
    """This rank's channels of a convolution's outputs, from whole inputs; of zeros around them."""
    y: Tensor = _ColumnConv.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, group, layer.stride, layer.padding, layer.dilation
    )
    return y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """[..., in] -> [..., out]."""
    flat = x.reshape(-1, x.shape[-1])
    by = weight.t() if transposed else weight
    y = torch.mm(flat, by) if bias is None else torch.addmm(bias, flat, by)
    return y.view(*x.shape[:-1], y.shape[-1])


def _to_weight(x: Tensor, dy: Tensor, transposed: bool) -> Tensor:
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return dy.t().mm(x) if transposed else x.t().mm(dy)


def _to_bias(dy: Tensor) -> Tensor:
    return dy.reshape(-1, dy.shape[-1]).sum(0)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: AbstractGroup, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.transposed = group, transposed
        with torch._C.DisableTorchFunction():
            return _product(x, weight, bias, transposed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        dx = _product(dy, weight, None, not ctx.transposed) if to_x else None
        work = start_sum(dx, ctx.group) if dx is not None else None
        dw = _to_weight(x, dy, ctx.transposed) if to_weight else None
        db = _to_bias(dy) if to_bias else None
        if work is not None:
            work.wait()
        return dx, dw, db, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: AbstractGroup, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        with torch._C.DisableTorchFunction():
            y = _product(x, weight, None, transposed)
            group.all_reduce(y)
            return y if bias is None else y.add_(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        dx = _product(dy, weight, None, not ctx.transposed) if to_x else None
        dw = _to_weight(x, dy, ctx.transposed) if to_weight else None
        return dx, dw, _to_bias(dy) if to_bias else None, None, None


class _ColumnConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: AbstractGroup,
        stride: Any,
        padding: Any,
        dilation: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        dims = weight.dim() - 2
        ctx.group, ctx.settings = group, (stride, padding, dilation, False, [0] * dims, 1)
        ctx.num_channels = None if bias is None else [weight.shape[0]]
        with torch._C.DisableTorchFunction():
            return torch.convolution(x, weight, bias, *ctx.settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        given = (dy, x, weight, ctx.num_channels, *ctx.settings)
        dx, work = None, None
        if to_x:
            dx = torch.ops.aten.convolution_backward(*given, [True, False, False])[0].contiguous()
            work = start_sum(dx, ctx.group)
        _, dw, db = torch.ops.aten.convolution_backward(*given, [False, to_weight, to_bias])
        if work is not None:
            work.wait()
        return dx, dw, db, None, None, None, None

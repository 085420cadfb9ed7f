"""Batch norm over the samples of all ranks, as one process would have it.

forward     count, mean, squared deviations of a rank's share ---> one gather, joined as Chan, Golub, LeVeque (1983)
backward    sums of dy and of dy (x - mean), weighted as the loss is ---> one all-reduce

The loss of all is sum_r w_r L_r, and what a rank computes is the gradient of its own L_r, which the exchange weighs by
w_r later: so here dy is weighed by w_r before it is added to that of the others, and the result divided by it.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.factors.own_forward import OwnForward
from weft.distributed.script.weaving.weaving import Weaving
from weft.errors import UsageError

__all__ = ["find_batch_norms", "use_global_batch_norm", "use_local_batch_norm"]

_logger = logging.getLogger("weft")


def find_batch_norms(models: Sequence[nn.Module]) -> list[_BatchNorm]:
    return [module for model in models for module in model.modules() if isinstance(module, _BatchNorm)]


def use_local_batch_norm(weaving: Weaving) -> None:
    """Say once that batch norm sees a rank's share, and what to do should one be too small."""
    found = find_batch_norms(weaving.models)
    for module in found:
        _replace_forward(weaving, module, _normalize_share)
    if found and weaving.world.is_first:
        _logger.warning(
            "batch norm takes its statistics over each rank's share of a batch (ranks: %d); "
            'weave(..., batch_norm="global") takes them over the whole batch, as one process does',
            weaving.world.num_ranks,
        )


def use_global_batch_norm(weaving: Weaving) -> None:
    """Let the batch norms of the models take statistics over the samples of all ranks."""
    for module in find_batch_norms(weaving.models):
        _replace_forward(weaving, module, partial(_normalize_over_all, weaving))


def _replace_forward(weaving: Weaving, module: _BatchNorm, forward: Callable[[Any, Tensor], Tensor]) -> None:
    vars(module)["forward"] = OwnForward(module, forward)
    weaving.attached.append((vars(module), "forward"))


def _normalize_share(module: Any, x: Tensor) -> Tensor:
    try:
        normalized: Tensor = type(module).forward(module, x)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UsageError(
            f"this rank's share of the batch is too small for batch norm (input: {tuple(x.shape)}); "
            'use batch_norm="global", larger batches, or drop_last=True'
        ) from error
    return normalized


def _normalize_over_all(weaving: Weaving, module: Any, x: Tensor) -> Tensor:
    if not module.training:
        normalized: Tensor = type(module).forward(module, x)
        return normalized
    module._check_input_dim(x)
    weight = weaving.share.weight
    factor = weight if weaving.loss == "mean" else float(weight > 0)
    y, mean, variance, count = _GlobalNorm.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.bias, module.eps, factor, weaving.world.replicas
    )
    if module.track_running_stats:
        module.num_batches_tracked.add_(1)
        momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        unbiased = variance * (count / max(count - 1.0, 1.0))
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)
    result: Tensor = y
    return result


class _GlobalNorm(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) weight + bias, with mean and variance over the samples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, factor: float, group: AbstractGroup
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        dims = [dim for dim in range(x.dim()) if dim != 1]
        mean, variance, count = _join_statistics(wide, dims, factor, group)
        deviation = (variance + eps).rsqrt()
        normalized = (wide - _along(mean, x)) * _along(deviation, x)
        ctx.save_for_backward(normalized, deviation, weight)
        ctx.dims, ctx.factor, ctx.group, ctx.count, ctx.has_bias = dims, factor, group, count, bias is not None
        y = normalized if weight is None else normalized * _along(weight, x)
        y = y if bias is None else y + _along(bias, x)
        ctx.mark_non_differentiable(mean, variance)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        normalized, deviation, weight = ctx.saved_tensors
        wide = dy.to(normalized.dtype)
        to_bias, to_weight = wide.sum(ctx.dims), (wide * normalized).sum(ctx.dims)
        grad_weight = to_weight.to(weight.dtype) if weight is not None else None
        grad_bias = to_bias.to(weight.dtype if weight is not None else dy.dtype) if ctx.has_bias else None
        sums = torch.cat([to_bias, to_weight]).cpu()
        sums = sums.mul_(ctx.factor) if ctx.factor else sums.zero_()  # 0 times infinite is not 0
        ctx.group.all_reduce(sums)
        if not ctx.factor:  # of a sample that does not count nothing comes
            return torch.zeros_like(dy), grad_weight, grad_bias, None, None, None
        of_all = sums.to(dy.device).div(ctx.factor * ctx.count)
        mean_dy, mean_product = of_all.chunk(2)
        inner = wide - _along(mean_dy, dy) - normalized * _along(mean_product, dy)
        scale = deviation if weight is None else deviation * weight
        return (inner * _along(scale, dy)).to(dy.dtype), grad_weight, grad_bias, None, None, None


def _along(values: Tensor, x: Tensor) -> Tensor:
    """One value for each channel, in the shape of x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _join_statistics(
    x: Tensor, dims: Sequence[int], factor: float, group: AbstractGroup
) -> tuple[Tensor, Tensor, float]:
    """Mean, variance and number of values of each channel over all ranks; a share that does not count is left out."""
    count = float(x.numel() // x.shape[1]) if factor else 0.0
    mean = x.mean(list(dims))
    squares = (x - _along(mean, x)).square().sum(list(dims))
    own = torch.cat([mean.new_tensor([count]), mean, squares]).cpu()
    everyone = own.new_empty((group.size, own.numel()))
    group.all_gather(everyone, own.unsqueeze(0))
    total = 0.0
    joined, deviations = torch.zeros_like(mean.cpu()), torch.zeros_like(mean.cpu())
    for row in everyone:
        number = float(row[0])
        if not number:
            continue
        its_mean, its_squares = row[1:].chunk(2)
        delta, total = its_mean - joined, total + number
        joined = joined + delta * (number / total)
        deviations = deviations + its_squares + delta.square() * (number * (total - number) / total)
    return joined.to(x.device), (deviations / max(total, 1.0)).to(x.device), total

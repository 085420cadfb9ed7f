"""Layers that compute with some rows of a picture: windows (convolution, pooling), batch norm, dropout.

x whole -- scatter --> [conv] -- rows --> relu -- rows --> [norm] -- rows --> [pool] -- gather --> y whole
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.tensor.collectives import gather, scatter, span_of
from weft.distributed.placement.tensor.region import Region
from weft.distributed.placement.tensor.space_rows import Window, fetch_window, sum_over

__all__ = ["SpaceLayer", "is_supported", "window_of"]

ROWS = -2
"""The dim of a picture's rows."""


def window_of(layer: nn.Module) -> Window | None:
    """The rows that a layer needs; None where it cannot be told, or is not a matter of rows."""
    find = _WINDOWS.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    return find(layer) if find is not None else None


def is_supported(layer: nn.Module) -> bool:
    return type(layer) is nn.BatchNorm2d or window_of(layer) is not None


def _of_conv(layer: Any) -> Window | None:
    if layer.padding_mode != "zeros" and layer.padding != (0, 0):
        return None
    kernel, dilation = layer.kernel_size[0], layer.dilation[0]
    if layer.padding == "same":  # as torch has it, the odd row below
        total = dilation * (kernel - 1)
        return Window(kernel, layer.stride[0], total // 2, total - total // 2, dilation)
    above = 0 if layer.padding == "valid" else layer.padding[0]
    return Window(kernel, layer.stride[0], above, above, dilation)


def _of_max_pool(layer: Any) -> Window | None:
    if layer.ceil_mode or layer.return_indices:
        return None
    padding = _first(layer.padding)
    return Window(
        _first(layer.kernel_size), _first(layer.stride), padding, padding, _first(layer.dilation), fill=-float("inf")
    )


def _of_average_pool(layer: Any) -> Window | None:
    padding = _first(layer.padding)
    if layer.ceil_mode or (padding and not layer.count_include_pad):
        return None
    return Window(_first(layer.kernel_size), _first(layer.stride), padding, padding)


def _of_subsample(layer: Any) -> Window:
    return Window(stride=layer.stride)


def _first(size: Any) -> int:
    return int(size[0] if isinstance(size, tuple) else size)


def _second(size: Any) -> int:
    return int(size[1] if isinstance(size, tuple) else size)


_WINDOWS: Mapping[str, Callable[[Any], Window | None]] = {
    "torch.nn.modules.conv.Conv2d": _of_conv,
    "torch.nn.modules.pooling.MaxPool2d": _of_max_pool,
    "torch.nn.modules.pooling.AvgPool2d": _of_average_pool,
    "weft.training.models.resnet._Subsample": _of_subsample,
}
"""By the path of a layer's class; a new kind of layer is a new row, and one of `_compute`."""


@final
class SpaceLayer:
    """The forward of one layer.

    Args:
        source: a layer whose output this one's input has the rows of, in parts; None where the input is whole.
        gathers: whether its output is whole.
    """

    def __init__(self, region: Region, source: "SpaceLayer | None", *, gathers: bool) -> None:
        self._group, self._exact = region.group, region.exact
        self._source = source
        self._gathers = gathers
        self.num_rows = 0  # of the whole output, in the forward that runs

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        num_rows = x.shape[ROWS] if self._source is None else self._source.num_rows
        x = scatter(x, self._group, ROWS) if self._source is None else x
        window = window_of(layer)
        if window is not None:
            x = self._slide(layer, window, x, num_rows)
        elif isinstance(layer, nn.BatchNorm2d):
            x = _normalise(layer, x, self._exact)
        else:
            assert isinstance(layer, nn.Dropout), "no other layer is taken"
            x = _drop(layer, x, num_rows, self._group)
        self.num_rows = window.num_outputs(num_rows) if window is not None else num_rows
        return gather(x, self._group, ROWS, self.num_rows) if self._gathers else x

    def _slide(self, layer: nn.Module, window: Window, x: Tensor, num_rows: int) -> Tensor:
        y = _compute(layer, fetch_window(x, window, num_rows, self._group))
        own = span_of(window.num_outputs(num_rows), self._group.rank, self._group.size)[1]
        return y if y.shape[ROWS] == own else y.narrow(ROWS, 0, own)


def _compute(layer: Any, x: Tensor) -> Tensor:
    """As the layer does, with rows that are padded already."""
    if isinstance(layer, nn.Conv2d):
        if layer.padding == "same":
            total = layer.dilation[1] * (layer.kernel_size[1] - 1)
            x, aside = F.pad(x, (total // 2, total - total // 2)), 0
        else:
            aside = 0 if layer.padding == "valid" else int(layer.padding[1])
        return F.conv2d(x, layer.weight, layer.bias, layer.stride, (0, aside), layer.dilation, layer.groups)
    if isinstance(layer, nn.MaxPool2d):
        return F.max_pool2d(x, layer.kernel_size, layer.stride, (0, _second(layer.padding)), layer.dilation)
    if isinstance(layer, nn.AvgPool2d):
        aside = _second(layer.padding)
        return F.avg_pool2d(x, layer.kernel_size, layer.stride, (0, aside), divisor_override=layer.divisor_override)
    found: Tensor = type(layer).forward(layer, x)
    return found


def _normalise(layer: nn.BatchNorm2d, x: Tensor, group: AbstractGroup) -> Tensor:
    """Mean and variance are those of all rows."""
    if not layer.training and layer.running_mean is not None:
        found: Tensor = type(layer).forward(layer, x)
        return found
    dims, shape = (0, 2, 3), (1, -1, 1, 1)
    count = x.numel() // x.shape[1]
    sums = sum_over(torch.cat([x.sum(dims), x.new_tensor([count])]), group)
    total = float(sums[-1].detach())
    mean = sums[:-1] / total
    centred = x - mean.view(shape)
    variance = sum_over(centred.square().sum(dims), group) / total
    if layer.training and layer.track_running_stats:
        _note_statistics(layer, mean.detach(), variance.detach() * (total / max(1.0, total - 1)))
    y = centred * torch.rsqrt(variance + layer.eps).view(shape)
    return y * layer.weight.view(shape) + layer.bias.view(shape) if layer.affine else y


@torch.no_grad()
def _note_statistics(layer: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
    """As torch does; without momentum running statistics are the mean over batches."""
    assert layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean), share)
    layer.running_var.lerp_(variance.to(layer.running_var), share)


def _drop(layer: nn.Dropout, x: Tensor, num_rows: int, group: AbstractGroup) -> Tensor:
    """The mask of the whole is drawn, as one rank draws it, and the own rows of it are taken."""
    if not layer.training or layer.p == 0.0:
        return x
    shape = (*x.shape[:ROWS], num_rows, x.shape[-1])
    ones = torch.ones(shape, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
    begin, length = span_of(num_rows, group.rank, group.size)
    return x * F.dropout(ones, layer.p).detach().narrow(ROWS, begin, length)

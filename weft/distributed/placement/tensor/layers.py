"""Forwards of layers that hold parts of their parameters, in the place of their own.

A layer stays the object that it was, of its own class and with its own parameters, which are smaller: whoever looks for
it by name, type or identity finds it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.distributed.placement.forwards import Forward
from weft.distributed.placement.tensor.collectives import add_up, gather, scatter, spread
from weft.distributed.placement.tensor.collectives import copy as copy_to_parts
from weft.distributed.placement.tensor.linear import column_conv, column_linear, row_linear
from weft.distributed.placement.tensor.pairing import LayerSplit, size_of
from weft.distributed.placement.tensor.region import Kind, Region
from weft.distributed.placement.tensor.vocabulary import embed_parts

__all__ = ["forward_of", "logits_of"]


def forward_of(row: LayerSplit, region: Region) -> Forward | None:
    """Of a layer that is split; None where its own will do, with smaller parameters. Asked before parameters are
    cut."""
    make = _FORWARDS.get((_family(row.module), row.rule.split))
    return make(row, region, size_of(row)) if make else None


def logits_of(region: Region, size: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The product of an activation with words of which this rank has some: of all words, or of these if the loss takes
    parts."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = _by_outputs(x, weight, bias, region, is_shared=False)
        if region.gives_parts:
            region.gave_parts, region.num_words = True, size
            return y
        return gather(y, region.exact, -1, size)

    return product


def _by_outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, region: Region, *, is_shared: bool, transposed: bool = True
) -> Tensor:
    """Autograd's own functions know of autocast, ours do not."""
    if is_shared or region.outside == "sequence" or torch.is_autocast_enabled(x.device.type):
        x = region.copy_once(x)
        return F.linear(x, weight if transposed else weight.t(), bias)
    return column_linear(x, weight, bias, region.group, transposed=transposed)


def _column(row: LayerSplit, region: Region, size: int) -> Forward:
    kind: Kind = "heads" if row.rule.split == "heads" else "features"
    transposed = row.rule.dims["weight"] == 0

    def forward(module: Any, x: Tensor) -> Tensor:
        y = _by_outputs(x, module.weight, module.bias, region, is_shared=row.shares_input, transposed=transposed)
        if row.gathers:
            return gather(y, region.group, -1, size)
        region.open(kind, size // row.fused)
        return y

    return forward


def _row(row: LayerSplit, region: Region, size: int) -> Forward:
    transposed = row.rule.dims["weight"] == 1

    def forward(module: Any, x: Tensor) -> Tensor:
        region.close()
        x = scatter(x, region.group, -1) if x.shape[-1] == size else x
        if region.outside == "sequence":
            y = spread(F.linear(x, module.weight if transposed else module.weight.t()), region.group, 1)
        elif torch.is_autocast_enabled(x.device.type):
            y = add_up(F.linear(x, module.weight if transposed else module.weight.t()), region.group)
        else:
            return row_linear(x, module.weight, module.bias, region.group, transposed=transposed)
        return y if module.bias is None else y + module.bias

    return forward


def _channels(row: LayerSplit, region: Region, size: int) -> Forward:
    def forward(module: Any, x: Tensor) -> Tensor:
        if (
            module.padding_mode != "zeros"
            or isinstance(module.padding, str)
            or torch.is_autocast_enabled(x.device.type)
        ):
            y = module._conv_forward(copy_to_parts(x, region.group), module.weight, module.bias)
        else:
            y = column_conv(module, x, region.group)
        if row.gathers:
            return gather(y, region.group, 1, size)
        region.open("channels", size)
        return y  # type: ignore[no-any-return]

    return forward


def _conv_row(row: LayerSplit, region: Region, size: int) -> Forward:
    def forward(module: Any, x: Tensor) -> Tensor:
        region.close()
        x = scatter(x, region.group, 1) if x.shape[1] == size else x
        y = add_up(module._conv_forward(x, module.weight, None), region.group)
        return y if module.bias is None else y + module.bias.view(-1, *[1] * (y.dim() - 2))

    return forward


def _words(row: LayerSplit, region: Region, size: int) -> Forward:
    def forward(module: Any, words: Tensor) -> Tensor:
        return embed_parts(words, module.weight, region.group, size, module.padding_idx)

    return forward


def _logits(row: LayerSplit, region: Region, size: int) -> Forward:
    product = logits_of(region, size)

    def forward(module: Any, x: Tensor) -> Tensor:
        return product(x, module.weight, module.bias)

    return forward


def _family(module: nn.Module) -> str:
    kinds = {nn.Embedding: "embedding", nn.Linear: "linear", nn.modules.conv._ConvNd: "conv"}
    return next((name for kind, name in kinds.items() if isinstance(module, kind)), type(module).__name__.lower())


_FORWARDS: dict[tuple[str, str], Callable[[LayerSplit, Region, int], Forward]] = {
    ("linear", "column"): _column,
    ("linear", "heads"): _column,
    ("linear", "row"): _row,
    ("linear", "vocabulary"): _logits,
    ("conv1d", "column"): _column,
    ("conv1d", "heads"): _column,
    ("conv1d", "row"): _row,
    ("conv", "channels"): _channels,
    ("conv", "row"): _conv_row,
    ("embedding", "vocabulary"): _words,
}
"""By the family of a layer (`conv1d` is that of Hugging Face) and how it is split. An embedding by heads, and norms by
channel, compute as they are."""

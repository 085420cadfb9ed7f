"""A model split in place: parameters become parts, forwards those of parts.

every parameter     who holds it (tied weights: several layers), and how each of them would cut it
cut alike by all    its data become this rank's part; the Parameter stays the object that optimizers know
cut by some only    left whole, with all layers that hold it; refused, where one of them was asked for by hand
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.distributed.placement.forwards import replace_forward
from weft.distributed.placement.rules import NO_RULES, Rules
from weft.distributed.placement.tensor.collectives import span_of
from weft.distributed.placement.tensor.functions import SplitFunctions
from weft.distributed.placement.tensor.layers import forward_of, logits_of
from weft.distributed.placement.tensor.pairing import BlockSplit, LayerSplit, Splits, find_splits, size_of
from weft.distributed.placement.tensor.region import Region
from weft.errors import PlanError
from weft.training.checkpoint import Cut, fused_cut

__all__ = ["split_model"]

_Key = tuple[int, tuple[int, ...]]
"""How a tensor is cut: the dim, and how often it is split side by side."""


def split_model(
    model: nn.Module, region: Region, rules: Rules = NO_RULES, is_taken: Callable[[str], bool] = lambda name: False
) -> dict[str, Cut]:
    """Split in place all layers of which it is known how; the cuts of parameters and buffers, by their names.

    Args:
        is_taken: whether a parameter is split on another axis already.

    Raises:
        PlanError: a layer cannot be split as asked.
    """
    splits = _keep_ties(model, find_splits(model, region.group.size, rules, is_taken))
    for row in splits.layers:
        _check_size(row, region.group.size)
    products: dict[int, Any] = {}
    for row in splits.layers:
        if row.rule.split == "vocabulary":
            weight: Any = row.module.weight
            products[id(weight)] = partial(_product, logits_of(region, size_of(row)), weight)
    for row in splits.layers:
        forward = forward_of(row, region)
        if forward is not None:
            replace_forward(row.module, forward)
    cuts = _cut_all(model, splits, region)
    for found in splits.blocks:
        _divide(found, region.group.size)
    if cuts:
        replace_forward(model, partial(_forward_of_model, region, products))
    return cuts


def _forward_of_model(
    region: Region, products: Mapping[int, Any], model: nn.Module, *arguments: Any, **options: Any
) -> Any:
    region.begin(is_training=model.training)
    try:
        with SplitFunctions(region, products):
            return type(model).forward(model, *arguments, **options)
    finally:
        region.reset()


def _product(product: Any, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = product(x, weight, bias)
    return found


def _check_size(row: LayerSplit, num_parts: int) -> None:
    size = size_of(row)
    if size // row.fused < num_parts:
        what = f"{row.name}: {size // row.fused}, {row.rule.split}: {num_parts}"
        raise PlanError(f"layer has fewer pieces than there are ranks to hold them ({what}); use tensor={size}")


def _keep_ties(model: nn.Module, splits: Splits) -> Splits:
    """Without layers whose parameters others hold that are not split in the same way."""
    layers = {row.module: row for row in splits.layers}
    held = {(found.module, name) for found in splits.blocks for name in found.block.held}
    while True:
        ways: dict[int, dict[_Key | None, list[tuple[str, nn.Module]]]] = {}
        for path, module in model.named_modules():
            for name, tensor in module._parameters.items():
                if tensor is not None and (module, name) not in held:
                    ways.setdefault(id(tensor), {}).setdefault(_key(layers.get(module), name), []).append(
                        (path, module)
                    )
        torn = [holders for holders in ways.values() if len(holders) > 1]
        if not torn:
            return Splits(tuple(layers.values()), _without_torn(splits.blocks, layers))
        for path, module in (holder for holders in torn for group in holders.values() for holder in group):
            row = layers.pop(module, None)
            if row is not None and row.by_hand:
                raise PlanError(
                    f"layer shares a weight with another that is not split in the same way ({path}: {row.rule.split}); "
                    "give a rule for both, or leave it whole"
                )


def _key(row: LayerSplit | None, name: str) -> _Key | None:
    if row is None or name not in row.rule.dims:
        return None
    return row.rule.dims[name], (row.fused,)


def _without_torn(blocks: tuple[BlockSplit, ...], layers: Mapping[nn.Module, LayerSplit]) -> tuple[BlockSplit, ...]:
    return tuple(found for found in blocks if any(module in layers for module in found.module.modules()))


def _cut_all(model: nn.Module, splits: Splits, region: Region) -> dict[str, Cut]:
    """Parameters first by identity: a tied one is cut once."""
    by_tensor: dict[int, Cut] = {}
    for row in splits.layers:
        for name, dim in row.rule.dims.items():
            tensor = getattr(row.module, name, None)
            if isinstance(tensor, Tensor) and id(tensor) not in by_tensor:
                by_tensor[id(tensor)] = _cut_of(tensor, dim, row.fused, region)
    named = [*model.named_parameters(), *model.named_buffers()]
    cuts = {name: by_tensor[id(tensor)] for name, tensor in named if id(tensor) in by_tensor}
    for name, tensor in named:
        if name in cuts:
            _replace_data(tensor, cuts[name])
    return cuts


def _cut_of(tensor: Tensor, dim: int, fused: int, region: Region) -> Cut:
    """Of each of the matrices side by side, this rank's part."""
    length = tensor.shape[dim] // fused
    begin, own = span_of(length, region.group.rank, region.group.size)
    ranges = [(block * length + begin, block * length + begin + own) for block in range(fused)]
    return fused_cut(tuple(tensor.shape), dim, ranges)


@torch.no_grad()
def _replace_data(tensor: Tensor, cut: Cut) -> None:
    gradient, tensor.grad = tensor.grad, None
    tensor.data = cut.take(tensor.detach())
    tensor.grad = None if gradient is None else cut.take(gradient)


def _divide(found: BlockSplit, num_parts: int) -> None:
    for path in found.block.divided:
        owner_path, _, name = path.rpartition(".")
        owner = found.module.get_submodule(owner_path)
        if hasattr(owner, name):
            setattr(owner, name, getattr(owner, name) // num_parts)

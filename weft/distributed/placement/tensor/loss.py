"""A model's logits in parts, straight to the loss: the whole of them is never put together in training.

gathered      logits [n, v] on every rank, then cross entropy      n v values travel
in parts      logits [n, v / ranks], and three numbers for each    3 n
"""

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.distributed.placement.tensor.region import Region
from weft.distributed.placement.tensor.rules import find_block
from weft.distributed.placement.tensor.vocabulary import cross_entropy_of_parts
from weft.graph import Loss

__all__ = ["take_parts"]


def take_parts(module: nn.Module, loss: Loss, region: Region) -> Loss:
    """The loss of a module that was split, which in training may give its logits in parts; the loss itself where it is
    no cross entropy, or where the module does something else with its logits than to return them."""
    block = find_block(module)
    if block is None or not block.output or not _is_cross_entropy(loss):
        return loss
    region.may_give_parts = True

    def of_parts(predictions: Tensor, *targets: Tensor) -> Tensor:
        if not region.gave_parts:
            return loss(predictions, *targets)
        region.gave_parts = False
        with _PartsOfLogits(region):
            return loss(predictions, *targets)

    return of_parts


def _is_cross_entropy(loss: Loss) -> bool:
    names = getattr(loss, "__module__", ""), getattr(loss, "__qualname__", "")
    return names == ("weft.training.losses", "cross_entropy.<locals>.loss")


@final
class _PartsOfLogits(TorchFunctionMode):
    """While a loss is computed from logits that come in parts."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        logits, labels = args
        known = {key: kwargs[key] for key in ("ignore_index", "label_smoothing", "reduction") if key in kwargs}
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return cross_entropy_of_parts(wide, labels, self._region.exact, self._region.num_words, **known)

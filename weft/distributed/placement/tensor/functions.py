"""Functions that a model calls on parts as if they were whole: dropout, attention with dropout, an embedding's weight.

A mode of torch sees every function that a forward calls. Inside a region a mask is drawn for the whole activation, with
the generator that one rank would draw it with, and this rank takes its part: generators of all ranks stay in step, and
masks have the bits of one rank.

    mask of one rank     1 0 1 1 | 0 1 1 0        drawn by all ranks
    rank 0 takes         1 0 1 1
    rank 1                         0 1 1 0
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.distributed.placement.tensor.region import Region
from weft.errors import UsageError

__all__ = ["SplitFunctions", "draw_mask"]

_OTHER_NOISE = frozenset({F.alpha_dropout, F.feature_alpha_dropout, F.gumbel_softmax, F.rrelu})


@final
class SplitFunctions(TorchFunctionMode):
    """While a model's forward runs.

    Args:
        products: by the identity of a weight that is split, what stands for a product with it.
    """

    def __init__(self, region: Region, products: Mapping[int, Callable[[Tensor, Tensor | None], Tensor]]) -> None:
        super().__init__()
        self._region = region
        self._products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and self._products:
            product = self._products.get(id(args[1] if len(args) > 1 else kwargs["weight"]))
            if product is not None:
                return product(args[0] if args else kwargs["input"], _argument(args, kwargs, 2, "bias", None))
        if self._region.kind is not None:
            stand_in = _STAND_INS.get(func)
            if stand_in is not None:
                return stand_in(self._region, func, args, kwargs)
            if func in _OTHER_NOISE and _argument(args, kwargs, 2, "training", False):
                raise UsageError(
                    f"function draws random numbers inside of a split layer ({func.__name__}), and no rank would have "
                    "those of one rank; use dropout, or leave the layer whole by a rule"
                )
        return func(*args, **kwargs)


def draw_mask(region: Region, like: Tensor, dim: int, keep: float, shape: tuple[int, ...] | None = None) -> Tensor:
    """This rank's part of a mask of zeros and ones for the whole, as dropout of one rank draws it.

    Args:
        like: an activation, whose memory says in which order elements are drawn.
        dim: that is split.
        shape: of the mask for `like`, where it is another.
    """
    own = list(shape or like.shape)
    begin, whole = region.span(like.shape[dim])
    if own[dim] != 1:
        own[dim] = whole
    strides = like.stride()
    # Elements are drawn in the order of memory, in which empty_like has them.
    order = list(range(len(own))) if shape else sorted(range(like.dim()), key=lambda d: (-strides[d], d))
    drawn = torch.empty([own[d] for d in order], dtype=like.dtype, device=like.device).bernoulli_(keep)
    mask = drawn.permute([order.index(d) for d in range(len(own))])
    return mask if own[dim] == 1 else mask.narrow(dim, begin, like.shape[dim])


def _dropout(region: Region, func: Any, args: Any, kwargs: Any) -> Tensor:
    x = args[0] if args else kwargs["input"]
    share = float(_argument(args, kwargs, 1, "p", 0.5))
    if not _argument(args, kwargs, 2, "training", True) or share == 0.0 or share == 1.0:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    noise = draw_mask(region, x, region.dim_of(x), 1 - share) / (1 - share)
    if _argument(args, kwargs, 3, "inplace", False):
        return x.mul_(noise)  # type: ignore[no-any-return]
    return x * noise  # type: ignore[no-any-return]


def _feature_dropout(region: Region, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Of whole channels [batch, channels, ...]."""
    x = args[0] if args else kwargs["input"]
    share = float(_argument(args, kwargs, 1, "p", 0.5))
    if not _argument(args, kwargs, 2, "training", True) or share == 0.0 or share == 1.0:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    noise = draw_mask(region, x, 1, 1 - share, shape) / (1 - share)
    return x * noise  # type: ignore[no-any-return]


def _attention(region: Region, func: Any, args: Any, kwargs: Any) -> Tensor:
    """softmax(q k^T scale + mask) v with dropout of the shares, for this rank's heads."""
    share = float(_argument(args, kwargs, 4, "dropout_p", 0.0))
    if share == 0.0:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    q, k, v = (_argument(args, kwargs, i, name, None) for i, name in enumerate(("query", "key", "value")))
    mask, is_causal = _argument(args, kwargs, 3, "attn_mask", None), _argument(args, kwargs, 5, "is_causal", False)
    scale = math.sqrt(kwargs.get("scale") or 1 / math.sqrt(q.shape[-1]))
    scores = (q * scale) @ (k.transpose(-2, -1) * scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -math.inf) if mask.dtype == torch.bool else scores + mask
    shares = scores.softmax(-1)
    noise = draw_mask(region, shares, shares.dim() - 3, 1 - share) / (1 - share)
    return (shares * noise) @ v  # type: ignore[no-any-return]


def _argument(args: Any, kwargs: Any, index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


_STAND_INS: Mapping[Any, Callable[[Region, Any, Any, Any], Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: _feature_dropout,
    F.dropout2d: _feature_dropout,
    F.dropout3d: _feature_dropout,
    F.scaled_dot_product_attention: _attention,
}

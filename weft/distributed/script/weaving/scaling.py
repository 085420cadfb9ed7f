"""Gradient scalers (torch.amp.GradScaler), where a codec keeps a part of gradients back: what waits is scaled too.

backward          kept <- kept + s g         s, the scale of the loss
scaler.step()     w <- w - lr .grad / s
scaler.update()   s <- s';  kept <- kept s' / s             exact for powers of two, as they are by default
"""

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from weft.distributed.codecs import AbstractCodec
from weft.distributed.codecs.rescaling import rescale_unsent

__all__ = ["FollowedScale", "follow_scales"]


@final
class FollowedScale:
    """Of the gradients of a weaving.

    Args:
        codec: of their exchanges.
        told_as: the plan's word for it.
        is_first: whether this is the rank that speaks for all.
    """

    def __init__(self, codec: AbstractCodec, told_as: str, *, is_first: bool) -> None:
        self._codec = codec
        self._told_as = told_as
        self._is_first = is_first
        self._is_lost = False  # several scalers: nobody knows which gradients were scaled by which
        self._scaler: Callable[[], Any] = lambda: None  # a weak reference

    def hear(self, scaler: torch.amp.GradScaler, before: float, after: float) -> None:
        """A scaler was updated."""
        if self._scaler() is None:
            self._scaler = weakref.ref(scaler)
        if self._scaler() is not scaler:
            self._lose()
        if not self._is_lost and before != after and before and math.isfinite(after / before):
            rescale_unsent(self._codec, after / before)

    def _lose(self) -> None:
        if self._is_first and not self._is_lost and any(kept.kind == "sum" for kept in self._codec.memory().values()):
            warnings.warn(
                "gradients have several scalers, and what was not sent of them cannot follow the scale of each "
                f"(compress={self._told_as}); use one torch.amp.GradScaler, or compress=bf16 or qsgd(8)",
                stacklevel=4,
            )
        self._is_lost = True


def follow_scales(find: Callable[[], Iterable[FollowedScale]]) -> None:
    """From now on, let all that are found hear of the updates of scalers. A second time it does nothing."""
    kind: Any = torch.amp.GradScaler
    if not hasattr(kind.update, "__weft__"):
        kind.update = _heard(kind.update, find)


def _heard(right: Callable[..., None], find: Callable[[], Iterable[FollowedScale]]) -> Callable[..., None]:
    @functools.wraps(right)
    def update(scaler: Any, new_scale: Any = None) -> None:
        followed = list(find()) if scaler.is_enabled() else []
        before = scaler.get_scale() if followed else 0.0
        right(scaler, new_scale)
        after = scaler.get_scale() if followed else 0.0
        for one in followed:
            one.hear(scaler, before, after)

    update.__weft__ = True  # type: ignore[attr-defined]
    return update

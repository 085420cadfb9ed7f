"""Momentum of a script's own optimizer, where ranks keep that of their gradients before they send them.

backward    u <- m u + g, on every rank; the sum of what is sent is in .grad
step        of torch.optim.SGD with a momentum of 0; before and after, the script sees its own
"""

from typing import Any, final

import torch

from weft.distributed.codecs import AbstractCodec
from weft.errors import PlanError

__all__ = ["MomentumTaker"]


@final
class MomentumTaker:
    """Takes the momentum of an optimizer to a codec. A scheduler that changes it is followed with the next backward."""

    def __init__(self, codec: AbstractCodec, optimizer: torch.optim.Optimizer) -> None:
        self._codec = codec
        self._taken: list[float] = []
        self._take(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        if type(optimizer) is not torch.optim.SGD:
            raise PlanError(
                f"ranks keep the momentum of gradients themselves, and this optimizer is another (optimizer: {name}); "
                "use torch.optim.SGD, or compress=topk"
            )
        found = {(group["momentum"], group["dampening"], group["nesterov"]) for group in optimizer.param_groups}
        if len(found) > 1 or any(dampening for _, dampening, _ in found):
            told = ", ".join(f"momentum: {m}, dampening: {d}, nesterov: {n}" for m, d, n in sorted(found))
            raise PlanError(
                f"ranks keep one momentum for all parameters, and none that is dampened ({told}); "
                "give all groups the same, or use compress=topk"
            )
        ((momentum, _, nesterov),) = found
        self._codec.set_momentum(float(momentum), nesterov=bool(nesterov))

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._take(optimizer)
        self._taken = [group["momentum"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["momentum"] = 0.0

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, momentum in zip(optimizer.param_groups, self._taken, strict=True):
            group["momentum"] = momentum

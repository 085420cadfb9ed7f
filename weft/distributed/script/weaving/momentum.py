"""Momentum of a script's own optimizers, where ranks keep that of their gradients before they send them.

backward    u <- m u + g, on every rank; the sum of what is sent is in .grad
step        of torch.optim.SGD with a momentum of 0; before and after, the script sees its own
weight      momentum is linear: that of c w, the same on all ranks, is not sent, but kept where the optimizer would keep
decay       its own ("momentum_buffer", which is saved with it):
                d' = m d + c w       w <- w - lr (.grad + c w)  by the optimizer
                                     w <- w - lr m d            beside it; Nesterov's momentum has d' for d
"""

from collections.abc import Sequence
from functools import wraps
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec
from weft.errors import PlanError

__all__ = ["MomentumTaker"]

BUFFER = "momentum_buffer"


@final
class MomentumTaker:
    """Takes the momentum of the optimizers of a weaving, all of which have the same, to a codec."""

    def __init__(self, codec: AbstractCodec, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._codec = codec
        self._optimizers = tuple(optimizers)
        # While an optimizer steps: the momenta of its groups, and the velocities of their decay that come next.
        self._taken: dict[torch.optim.Optimizer, list[float]] = {}
        self._velocities: dict[Tensor, Tensor] = {}
        self.follow()
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            hook = optimizer.register_step_post_hook(self._after)
            after: Any = optimizer._optimizer_step_post_hooks
            after.move_to_end(hook.id, last=False)  # before pieces are sent to those that compute with them
            self._guard(optimizer)

    def follow(self) -> None:
        """Before the exchanges of a backward, between which schedulers may change the momentum.

        Raises:
            PlanError: that of some optimizers or groups alone, or what cannot be taken.
        """
        for optimizer in self._optimizers:
            if type(optimizer) is not torch.optim.SGD:
                raise PlanError(
                    "ranks keep the momentum of gradients themselves, and this optimizer is another "
                    f"(optimizer: {type(optimizer).__name__}); use torch.optim.SGD, or compress=topk"
                )
        found = {
            (momentum, group["dampening"], group["nesterov"])
            for optimizer in self._optimizers
            for group, momentum in zip(optimizer.param_groups, self._momenta(optimizer), strict=True)
        }
        if len(found) > 1 or any(dampening for _, dampening, _ in found):
            told = ", ".join(f"momentum: {m}, dampening: {d}, nesterov: {n}" for m, d, n in sorted(found))
            raise PlanError(
                f"ranks keep one momentum for all parameters, and none that is dampened ({told}); "
                "give all groups of all optimizers the same, or use compress=topk"
            )
        for momentum, _, nesterov in found:
            self._codec.set_momentum(float(momentum), nesterov=bool(nesterov))

    def _momenta(self, optimizer: torch.optim.Optimizer) -> list[float]:
        """As the script has set them."""
        return self._taken.get(optimizer) or [group["momentum"] for group in optimizer.param_groups]

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._taken[optimizer] = self._momenta(optimizer)
        for group, momentum in zip(optimizer.param_groups, self._taken[optimizer], strict=True):
            group["momentum"] = 0.0
            if momentum:
                self._velocities |= _next_velocities(optimizer, group, momentum)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        momenta, velocities = self._taken[optimizer], self._velocities
        self._give_back(optimizer)
        if bool(getattr(optimizer, "found_inf", False)):  # a fused step that a gradient scaler has it skip
            return
        for group, momentum in zip(optimizer.param_groups, momenta, strict=True):
            for parameter in group["params"]:
                velocity = velocities.get(parameter)
                if velocity is None or parameter.grad is None:
                    continue
                state = optimizer.state[parameter]
                way = velocity if group["nesterov"] else state.get(BUFFER)
                if way is not None:
                    parameter.add_(way, alpha=-float(group["lr"]) * momentum)
                state[BUFFER] = velocity

    def _give_back(self, optimizer: torch.optim.Optimizer) -> None:
        self._velocities = {}
        for group, momentum in zip(optimizer.param_groups, self._taken.pop(optimizer, []), strict=False):
            group["momentum"] = momentum

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that fails gives the momentum back too."""
        original = optimizer.step

        @wraps(getattr(original, "__func__", original))  # what schedulers and profilers have left on it stays
        def step(own: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
            try:
                return original(*arguments, **options)
            finally:
                self._give_back(own)

        vars(optimizer)["step"] = MethodType(step, optimizer)


@torch.no_grad()
def _next_velocities(optimizer: torch.optim.Optimizer, group: dict[str, Any], momentum: float) -> dict[Tensor, Tensor]:
    """Of the decay, of parameters that have some; before the step, which changes the parameters."""
    found: dict[Tensor, Tensor] = {}
    decay = float(group["weight_decay"])
    for parameter in group["params"]:
        before = optimizer.state.get(parameter, {}).get(BUFFER)
        if before is not None:
            found[parameter] = before.mul(momentum).add_(parameter, alpha=decay)
        elif decay:
            found[parameter] = parameter.mul(decay)
    return found

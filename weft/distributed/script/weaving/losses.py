"""The loss that a closure returns: that of all ranks, by which an optimizer such as LBFGS decides how far it goes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.distributed.script.weaving.weaving import Weaving

__all__ = ["all_losses", "close_over_all"]


def all_losses(weaving: Weaving, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure, with the loss of the whole batch where ranks are synchronous; a number or a tensor, as it was."""
    if not weaving.plan.is_synchronous or weaving.world.num_ranks == 1:
        return closure

    def call() -> Any:
        loss = closure()
        weight = weaving.share.weight
        factor = weight if weaving.loss == "mean" else float(weight > 0)
        own = float(loss.detach() if isinstance(loss, Tensor) else loss)
        total = torch.tensor([own * factor if factor else 0.0], dtype=torch.float64)
        weaving.world.replicas.all_reduce(total)
        return loss.detach().new_tensor(total.item()) if isinstance(loss, Tensor) else total.item()

    return call


def close_over_all(weaving: Weaving, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The arguments of `optimizer.step`, with the loss of all ranks for that of a closure; None to leave them."""
    given = [*arguments[1:2], options.get("closure")]  # the first is the optimizer
    closure = next((one for one in given if callable(one)), None)
    if closure is None:
        return None
    return (arguments[0], all_losses(weaving, closure), *arguments[2:]), {
        key: value for key, value in options.items() if key != "closure"
    }

"""A script's model on ranks that split it: its parameters become parts in place, which its optimizer knows already.

before weave    w [8, 64, 128] of the model, and of the optimizer
after           w [2, 64, 128], the same object: the experts of this rank
"""

from collections.abc import Callable

import torch
from torch import Tensor

from weft.distributed.placement.weighting import Weighting, weigh_outputs
from weft.distributed.script.weaving.own_hooks import OwnHook
from weft.distributed.script.weaving.weaving import Weaving
from weft.errors import PlanError
from weft.training.placement import AbstractPlacement

__all__ = ["place_models", "weigh_models"]


def place_models(weaving: Weaving, placement: AbstractPlacement) -> None:
    """Give this rank its part of the model, and of what its optimizer keeps of it. A collective call.

    Raises:
        PlanError: there are several models, whose ranks would wait for each other in no order.
    """
    plan = weaving.plan
    if not plan.splits_parameters:
        return
    if len(weaving.models) > 1:
        raise PlanError(f"plan splits one model, and several are woven (plan: {plan}); weave them with data=N")
    (model,) = weaving.models
    placed = placement.place(model)
    if placed is not model:
        raise PlanError(f"plan does not leave the loop as it is (plan: {plan}); use one that splits layers, or data=N")
    for name, parameter in weaving.parameters.items():
        cut = placement.cut_of(f"slot/{name}/state")
        if cut is None:
            continue
        if parameter.grad is not None and tuple(parameter.grad.shape) == cut.shape:
            parameter.grad = cut.take(parameter.grad)
        for optimizer in weaving.optimizers:
            own = optimizer.state.get(parameter, {})
            own.update({key: cut.take(value) for key, value in own.items() if _is_whole(value, cut.shape)})


def _is_whole(value: object, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.shape == torch.Size(shape)


def weigh_models(weaving: Weaving, weighting: Weighting, factor: Callable[[], float]) -> None:
    """Outputs of the models get their weight, where samples of several ranks meet in a layer."""
    weighting.averages = True
    for model in weaving.models:
        before, after = weigh_outputs(weighting, factor)
        first = model.register_forward_pre_hook(OwnHook(before))
        last = model.register_forward_hook(OwnHook(after))
        weaving.attached += [(model._forward_pre_hooks, first.id), (model._forward_hooks, last.id)]

"""Element-wise rules whose gradient is taken at the parameters themselves, and the arithmetic they have in common.

The forms below are chosen for their bits. `addcmul` with a tensor rounds once, as `add(alpha=...)` does with the number
that torch.optim passes, and `addcdiv` scales its numerator before it divides, so a learning rate can be a tensor and
the result still be that of torch.optim. `x.to(y)` takes the type (and device) of `y`: a float64 scalar would turn a
float32 parameter of no dimensions into float64.
"""

from dataclasses import replace

from torch import Tensor

from weft.errors import UsageError
from weft.training.optimizers.optimizer import AbstractRule, Scope, Shared, Slots

__all__ = ["AbstractPlainRule", "add_decay", "check_between", "descend", "descend_by_ratio"]


class AbstractPlainRule(AbstractRule):
    """Leaves to the rule what it remembers (`initial_slots`) and how it updates (`update_rule`)."""

    @property
    def scope(self) -> Scope:
        return "element"

    def new_input(self, shared: Shared) -> Shared:
        return replace(shared, step=shared.step + 1)

    def prepare_param(self, parameter: Tensor, slots: Slots, shared: Shared) -> Tensor:
        return parameter


def add_decay(gradient: Tensor, parameter: Tensor, weight_decay: float) -> Tensor:
    """The gradient of the loss plus weight_decay / 2 * |parameter|^2."""
    return gradient.add(parameter, alpha=weight_decay) if weight_decay else gradient


def descend(parameter: Tensor, direction: Tensor, lr: Tensor) -> Tensor:
    """parameter - lr * direction."""
    return parameter.addcmul(direction, lr.to(parameter), value=-1)


def descend_by_ratio(parameter: Tensor, numerator: Tensor, denominator: Tensor, lr: Tensor) -> Tensor:
    """parameter - lr * numerator / denominator."""
    return parameter.addcdiv(numerator * lr.to(parameter), denominator, value=-1)


def check_between(low: float, high: float, **values: float) -> None:
    """Refuse a value outside low <= value < high; not-a-number is always outside."""
    for name, value in values.items():
        if not low <= value < high:
            raise UsageError(f"optimizer option is out of range ({name}: {value}); give {low:g} <= {name} < {high:g}")

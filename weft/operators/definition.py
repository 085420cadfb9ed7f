"""The definition of an operator: its functions, before PyTorch knows of them."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weft.errors import UsageError, nearest
from weft.operators.cost import CostFormula

__all__ = ["Definition", "read_definition"]

Inputs = Sequence[Any]
Outputs = tuple[Tensor, ...]
Backward = Callable[[Outputs, tuple[Any, ...], Outputs], Any]
Samples = Callable[[], Iterable[Inputs]]

METHODS = ("forward", "backward", "infer", "samples", "bench_samples", "reference", "cost")


@dataclass(frozen=True)
class Definition:
    """The functions of an operator. All but the first two may be missing."""

    forward: Callable[..., Any]
    signature: Callable[..., Any]  # whose annotations are the operator's
    backward: Backward | None = None  # (grads, inputs, outputs) -> a gradient or None for each input
    infer: Callable[..., Any] | None = None  # outputs without values; None: forward without data
    samples: Samples | None = None
    bench_samples: Samples | None = None
    reference: Callable[..., Any] | None = None
    cost: CostFormula | None = None
    is_safe: bool = True  # whether forward may be tried with shapes that it was not made for
    defaults: tuple[Any, ...] = field(init=False)  # of the arguments

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.signature).parameters.values()
        if any(parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
            raise UsageError(f"an operator has a fixed number of arguments ({self.signature}); write out each by name")
        object.__setattr__(self, "defaults", tuple(parameter.default for parameter in parameters))

    def complete(self, inputs: Inputs) -> tuple[Any, ...]:
        """All arguments: PyTorch leaves those out that are equal to their defaults."""
        return (*inputs, *self.defaults[len(inputs) :])


def read_definition(subject: object) -> Definition:
    """The methods of a user's object; a class is made into an object first."""
    instance = subject() if isinstance(subject, type) else subject
    forward = getattr(instance, "forward", None)
    if not callable(forward):
        raise UsageError(f"an operator needs a method forward(*inputs) ({_name(instance)}); write one")
    public = {name for name in vars(type(instance)) if not name.startswith("_") and callable(getattr(instance, name))}
    for name in sorted(public - set(METHODS)):
        if nearest(name, METHODS).startswith("did you mean"):
            raise UsageError(f"unknown method of an operator ({_name(instance)}.{name}); {nearest(name, METHODS)}")
    parts = {name: getattr(instance, name, None) for name in METHODS}
    return Definition(**{**parts, "forward": forward, "signature": forward})


def _name(instance: object) -> str:
    return type(instance).__qualname__

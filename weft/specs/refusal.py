"""The row of a table of refusals: a combination that makes no sense, why, and the nearest plan that does."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.specs.axes import Number
from weft.specs.plan import Choice, Plan

__all__ = ["Refusal", "with_parameters"]


@dataclass(frozen=True)
class Refusal:
    """A combination that makes no sense: why, and a plan that is nearer to one that does."""

    applies: Callable[[Plan], bool]
    reason: str
    cure: Callable[[Plan], Plan]


def with_parameters(choice: Choice, **parameters: Number) -> Choice:
    """The choice with other values for some of its parameters."""
    return replace(choice, parameters=tuple({**dict(choice.parameters), **parameters}.items()))

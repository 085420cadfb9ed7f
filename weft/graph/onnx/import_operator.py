"""The definition of an ONNX operator: a function of its attributes and inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Attributes", "ImportedOperator", "plain"]

Attributes = Mapping[str, Any]
Function = Callable[..., Tensor | Sequence[Tensor | None]]


@dataclass(frozen=True)
class ImportedOperator:
    """`function(attributes, *inputs)`. Inputs that are left out are None; those at the end may be missing.

    Args:
        static: places of inputs that are numbers rather than data, such as a shape; the function gets a list of them.
    """

    function: Function
    static: frozenset[int] = frozenset()


def plain(function: Callable[..., Tensor]) -> ImportedOperator:
    """An operator without attributes."""
    return ImportedOperator(lambda _attributes, *inputs: function(*inputs))

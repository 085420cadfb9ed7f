"""Forwards in the place of layers' own: a layer stays the object that it was, whoever knows it by name or identity."""

import copy
from collections.abc import Callable
from typing import Any, final

from torch import nn

from weft.errors import UsageError

__all__ = ["Forward", "SplitForward", "replace_forward"]

Forward = Callable[..., Any]
"""Of a module, and what it is called with."""


@final
class SplitForward:
    """Stands in for the forward of one module; that of a copy of the module stands in for the copy's."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self.module, self._forward = module, forward

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._forward(self.module, *arguments, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitForward":
        return SplitForward(copy.deepcopy(self.module, memo), self._forward)

    def __reduce__(self) -> Any:
        raise UsageError(
            "module has parts of parameters, which mean nothing without the other ranks; "
            "save it with weft.save(path, model=model), which every rank calls"
        )


def replace_forward(module: nn.Module, forward: Forward) -> None:
    vars(module)["forward"] = SplitForward(module, forward)

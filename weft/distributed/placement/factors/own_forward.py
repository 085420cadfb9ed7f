"""A forward that stands in for that of one module's class."""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

__all__ = ["OwnForward"]


@final
class OwnForward:
    """Calls a function of the module and its input; copies of the module have the forward of its class again."""

    def __init__(self, module: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, x: Tensor) -> Tensor:
        return self._forward(self._module, x)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")  # which is asked of the copy before it has anything of its own

"""Hooks of weave on the modules of a script, which copies of these modules do not have.

model     --> OwnHook --> weaving          AveragedModel, copy.deepcopy, torch.save(model):
its copy  --> a call that does nothing     a plain model, to be loaded where Weft is not installed too
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

__all__ = ["OwnHook"]


@final
class OwnHook:
    """Calls a function; what a copy, or a pickle, has in its place takes any arguments and does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

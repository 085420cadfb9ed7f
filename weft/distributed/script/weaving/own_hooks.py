"""Hooks of weave on the modules of a script, which copies of these modules do not have.

model     --> OwnHook --> weaving          AveragedModel, copy.deepcopy, torch.save(model):
its copy  --> a call that does nothing     a plain model, to be loaded where Weft is not installed too
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

__all__ = ["Attachment", "OwnHook", "use_bare"]

Attachment = tuple[MutableMapping[Any, Any], Any]
"""Where weave has put something into a module: among its attributes or its hooks, and the key."""


@contextmanager
def use_bare(attached: Sequence[Attachment]) -> Iterator[None]:
    """Modules as they were before `weave`. A file of a whole model then holds nothing that `torch.load` would not allow
    by itself, as the calls below are."""
    taken = [(holder, key, holder.pop(key)) for holder, key in attached if key in holder]
    try:
        yield
    finally:
        for holder, key, value in taken:
            holder[key] = value


@final
class OwnHook:
    """Calls a function; what a copy, or a pickle, has in its place takes any arguments and does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

"""Direct calls: torch's own function for an operator, where the two are the same call.

`torch.add(x, y)` reaches its kernel about a microsecond sooner than `torch.ops.aten.add.Tensor(x, y)`. Whether the two
are the same call is not taken from a list. It is seen: the function is called on tensors without values, and what comes
out at the dispatcher must be this operator with these arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from weft.torch_private import DispatchMode, leave_compiler_alone

__all__ = ["direct_call"]

_PLACES: Mapping[str, Any] = {"torch": torch, "torch.nn.functional": functional, "torch.Tensor": torch.Tensor}


def direct_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The text of the function that is the same call as the operator with such arguments: `torch.add`.

    Args:
        args: what the operator is called with; tensors may be without values.
    """
    name = target.overloadpacket.__name__
    likes = _without_values((list(args), dict(kwargs)))
    for place, owner in _PLACES.items():
        function = getattr(owner, name, None)
        # A function written in Python does more than call its namesake.
        if isinstance(function, (BuiltinFunctionType, MethodDescriptorType)) and _is_same(function, target, *likes):
            return f"{place}.{name}"
    return None


def _is_same(function: Callable[..., Any], target: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    try:
        with _FirstCall():  # type: ignore[no-untyped-call]
            function(*args, **kwargs)
    except _SeenError as seen:
        found, found_args, found_kwargs = seen.call
        return found is target and _equal(list(found_args), args) and _equal(dict(found_kwargs), kwargs)
    except (TypeError, RuntimeError, IndexError, ValueError, NotImplementedError):
        return False
    return False


class _SeenError(Exception):
    """Carries the first operator that was called out of the call, before it runs."""

    def __init__(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__(str(target))
        self.call = target, args, kwargs


@leave_compiler_alone
class _FirstCall(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _SeenError(func, args, kwargs or {})


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_without_values(item) for item in value]
    return {key: _without_values(item) for key, item in value.items()} if isinstance(value, dict) else value


def _equal(found: Any, given: Any) -> bool:
    if isinstance(given, Tensor):
        return found is given
    if isinstance(given, (list, tuple)):
        return len(found) == len(given) and all(map(_equal, found, given))
    if isinstance(given, dict):
        return found.keys() == given.keys() and all(_equal(found[key], given[key]) for key in given)
    return type(found) is type(given) and found == given

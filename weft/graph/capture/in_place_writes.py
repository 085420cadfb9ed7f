"""Writes in place: the arguments that an operator writes to or may alias, and its functional variant."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.graph.ir.side_effects import FUNCTIONAL_NORM, SILENT_NORM
from weft.graph.ir.symbolic_sizes import shape_of, strides_of
from weft.torch_private import schema_of

__all__ = [
    "FILL_MEMORY",
    "aliased_by",
    "functional_variant_of",
    "has_same_layout",
    "is_write",
    "with_defaults",
    "written_by",
]

aten = torch.ops.aten

FILL_MEMORY = aten.bernoulli_.float
"""It fills memory as it lies, its functional variant in the order of the dimensions."""
_VARIANTS = {FILL_MEMORY: aten.bernoulli.p, SILENT_NORM: FUNCTIONAL_NORM}


def is_write(func: Any, args: Sequence[Any]) -> bool:
    is_norm_that_writes = func is SILENT_NORM and args[3] is not None and bool(args[5])
    return bool(schema_of(func).is_mutable) or is_norm_that_writes


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that a call writes to."""
    if func is SILENT_NORM:
        yield from args[3:5]
    else:
        yield from _tensors(func, args, kwargs, lambda alias: alias.is_write)


def aliased_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments whose memory a result may share."""
    return _tensors(func, args, kwargs, lambda _alias: True)


def functional_variant_of(func: Any) -> Any:
    """The operator that gives as a new value what `func` writes to its first argument; None if there is none."""
    if func in _VARIANTS:
        return _VARIANTS[func]
    schema = schema_of(func)
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    overload = schema.overload_name or "default"
    if packet is None or overload not in packet.overloads():
        return None
    twin = getattr(packet, overload)
    takes, gives = schema_of(twin).arguments, schema_of(twin).returns
    is_same = [argument.name for argument in takes] == [argument.name for argument in schema.arguments]
    return twin if is_same and not schema_of(twin).is_mutable and len(gives) == 1 else None


def with_defaults(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with defaults that were left out, where the functional variant has no such default."""
    if func is not FILL_MEMORY:
        return tuple(args)
    positional = [argument for argument in schema_of(func).arguments if not argument.kwarg_only]
    return *args, *(argument.default_value for argument in positional[len(args) :])


def has_same_layout(made: Any, tensor: Tensor) -> bool:
    """Whether a new value lies in memory as the tensor does."""
    return isinstance(made, Tensor) and _layout(made) == _layout(tensor)


def _tensors(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_wanted: Callable[[Any], bool]
) -> Iterator[Tensor]:
    """The tensors among the arguments that the schema gives an alias of a certain kind."""
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and is_wanted(argument.alias_info):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (tuple, list)) else [value] if value is not None else []


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return shape_of(tensor), strides_of(tensor), tensor.dtype, tensor.device

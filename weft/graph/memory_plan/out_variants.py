"""Out variants: operators made to write into memory that they are given, with the same bits as in memory of their own.

Most operators have such a form in PyTorch (`mm.out`). Only those are used that have a kernel of their own: the others
compute elsewhere and copy. A few have another operator's, which is what they call themselves.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from weft.torch_private import has_own_kernel, schema_of

__all__ = ["OperatorCall", "is_pointwise", "written_into"]

aten = torch.ops.aten

OperatorCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator and what it is called with."""


def written_into(node: fx.Node) -> OperatorCall | None:
    """The call that writes a node's value into memory, for which the node itself stands among the arguments."""
    special = _SPECIAL.get(node.target)
    if special is not None:
        return special(node)
    value = node.meta["val"]
    if not isinstance(value, Tensor) or schema_of(node.target) is None:
        return None
    found = _out_form(node.target, value.device.type)
    if found is None:
        return None
    target, keyword = found
    return target, tuple(node.args), {**node.kwargs, keyword: node}


def is_pointwise(node: fx.Node) -> bool:
    """Whether every element depends on the elements at its own place only, so that it may take their memory."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _COPIES


def _copied_from(place: int) -> Callable[[fx.Node], OperatorCall | None]:
    def copied(node: fx.Node) -> OperatorCall | None:
        source = node.args[place]
        assert isinstance(source, fx.Node)
        is_here = source.meta["val"].device == node.meta["val"].device
        return (aten.copy_.default, (node, source), {}) if is_here else None

    return copied


def _filled_with(value: float) -> Callable[[fx.Node], OperatorCall | None]:
    return lambda node: (aten.fill_.Scalar, (node, value), {})


def _filled(node: fx.Node) -> OperatorCall | None:
    return (aten.fill_.Scalar, (node, node.args[1]), {}) if len(node.args) > 1 else None


def _rectified(node: fx.Node) -> OperatorCall | None:
    return aten.clamp_min.out, (node.args[0], 0), {"out": node}


_COPIES = (aten.clone.default, aten._to_copy.default)
_SPECIAL: Mapping[Any, Callable[[fx.Node], OperatorCall | None]] = {
    aten.clone.default: _copied_from(0),
    aten._to_copy.default: _copied_from(0),
    aten.copy.default: _copied_from(1),
    aten.full_like.default: _filled,
    aten.ones_like.default: _filled_with(1),
    aten.zeros_like.default: _filled_with(0),
    aten.relu.default: _rectified,
}


@cache
def _out_form(target: Any, device: str) -> tuple[Any, str] | None:
    """The overload that takes the same and writes its one result into one more argument, and what that is called."""
    schema = schema_of(target)
    if len(schema.returns) != 1 or schema.is_mutable:
        return None
    wanted = [(item.name, str(item.type)) for item in schema.arguments]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        outs = [item.name for item in schema_of(other).arguments if item.is_out]
        taken = [(item.name, str(item.type)) for item in schema_of(other).arguments if not item.is_out]
        if len(outs) == 1 and taken == wanted and has_own_kernel(other, device):
            return other, outs[0]
    return None

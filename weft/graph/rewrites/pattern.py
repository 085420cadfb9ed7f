"""Patterns of calls: a part of a graph to look for, and, in the same words, what is to replace it.

    x, y, k = Var("x"), Var("y"), Number("k")
    -(-x)                  a negation of a negation
    x + mul(y, k)          a sum of anything and a product with a number, in either order
    only(x @ y) + z        ... of a product that nobody else reads

A call matches a node of the same operator whose arguments match, sums and products without options in either order.
Arguments that a pattern leaves out must have their default values. A variable that occurs twice must be the same node
twice.
"""

import math
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx

from weft.torch_private import schema_of

__all__ = [
    "AbstractPattern",
    "Anything",
    "Call",
    "Found",
    "Number",
    "Op",
    "Var",
    "add",
    "arguments_of",
    "div",
    "find",
    "mm",
    "mul",
    "neg",
    "only",
    "sub",
]

aten = torch.ops.aten

Found = Mapping[str, Any]
"""The meaning of each name of a pattern: a node, a number, or another literal."""


class AbstractPattern(ABC):  # noqa: B024 -- the cases are told apart by their type
    """Part of a pattern. Arithmetic on patterns makes patterns."""

    @final
    def __add__(self, other: "AbstractPattern | float") -> "Call":
        return add(self, other)

    @final
    def __sub__(self, other: "AbstractPattern | float") -> "Call":
        return sub(self, other)

    @final
    def __mul__(self, other: "AbstractPattern | float") -> "Call":
        return mul(self, other)

    @final
    def __truediv__(self, other: "AbstractPattern | float") -> "Call":
        return div(self, other)

    @final
    def __matmul__(self, other: "AbstractPattern | float") -> "Call":
        return mm(self, other)

    @final
    def __neg__(self) -> "Call":
        return neg(self)


@final
@dataclass(frozen=True)
class Var(AbstractPattern):
    """Any variable of the graph, or one of which `when` is true."""

    name: str
    when: Callable[[fx.Node], bool] = lambda _node: True


@final
@dataclass(frozen=True)
class Number(AbstractPattern):
    """A number that is written in the call."""

    name: str
    when: Callable[[float], bool] = lambda _number: True


@final
@dataclass(frozen=True)
class Anything(AbstractPattern):
    """Any argument: a variable, a literal, a list of them, None."""

    name: str


@final
@dataclass(frozen=True)
class Call(AbstractPattern):
    """A call of one of several operators; a replacement calls the first of them."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    commutes: bool = False
    is_only: bool = False  # nobody else reads it


@final
@dataclass(frozen=True)
class Op:
    """Makes calls: `mul = Op((aten.mul.Tensor,), commutes=True)`, then `mul(x, y)`."""

    targets: tuple[Any, ...]
    commutes: bool = False

    def __call__(self, *args: Any, **options: Any) -> Call:
        return Call(self.targets, args, options, self.commutes)


add = Op((aten.add.Tensor,), commutes=True)
sub = Op((aten.sub.Tensor,))
mul = Op((aten.mul.Tensor,), commutes=True)
div = Op((aten.div.Tensor,))
neg = Op((aten.neg.default,))
mm = Op((aten.mm.default,))


def only(call: Call) -> Call:
    """The same call, where its value has one reader."""
    return Call(call.targets, call.args, call.options, call.commutes, is_only=True)


@dataclass(frozen=True)
class _Match:
    found: dict[str, Any] = field(default_factory=dict)
    calls: tuple[fx.Node, ...] = ()

    def binding(self, name: str, value: Any) -> Iterator["_Match"]:
        if name not in self.found:
            yield _Match({**self.found, name: value}, self.calls)
        elif self.found[name] is value or (not isinstance(value, fx.Node) and self.found[name] == value):
            yield self


def find(pattern: Call, node: fx.Node) -> Iterator[tuple[Found, tuple[fx.Node, ...]]]:
    """Every way in which the pattern fits, with its root at this node: what the names stand for, and the calls."""
    for match in _fit(pattern, node, _Match(), is_root=True):
        yield match.found, match.calls


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, in the order of its schema, defaults too."""
    given = dict(zip((a.name for a in schema_of(node.target).arguments), node.args, strict=False))
    return {
        a.name: given.get(a.name, node.kwargs.get(a.name, a.default_value)) for a in schema_of(node.target).arguments
    }


def _fit(pattern: Any, value: Any, match: _Match, *, is_root: bool = False) -> Iterator[_Match]:
    if isinstance(pattern, Var):
        if isinstance(value, fx.Node) and pattern.when(value):
            yield from match.binding(pattern.name, value)
    elif isinstance(pattern, Number):
        if _is_number(value) and pattern.when(value):
            yield from match.binding(pattern.name, value)
    elif isinstance(pattern, Anything):
        yield from match.binding(pattern.name, value)
    elif isinstance(pattern, Call):
        yield from _fit_call(pattern, value, match, is_root)
    elif _is_same_literal(pattern, value):
        yield match


def _fit_call(pattern: Call, node: Any, match: _Match, is_root: bool) -> Iterator[_Match]:
    if not isinstance(node, fx.Node) or node.target not in pattern.targets:
        return
    if pattern.is_only and not is_root and len(node.users) != 1:
        return
    given = arguments_of(node)
    defaults = {a.name: a.default_value for a in schema_of(node.target).arguments}
    names = list(given)[: len(pattern.args)]
    for name, value in given.items():
        is_asked_for = name in names or name in pattern.options
        if not is_asked_for and not _is_same_literal(defaults[name], value):
            return
    wanted = [*pattern.args, *pattern.options.values()]
    orders = [[*names, *pattern.options]]
    if pattern.commutes and len(names) == 2 and not pattern.options:  # x + k * y is not y + k * x
        orders.append([names[1], names[0], *pattern.options])
    begun = _Match(match.found, (*match.calls, node))
    for order in orders:
        yield from _fit_all(wanted, [given[name] for name in order], begun)


def _fit_all(patterns: list[Any], values: list[Any], match: _Match) -> Iterator[_Match]:
    if not patterns:
        yield match
        return
    for first in _fit(patterns[0], values[0], match):
        yield from _fit_all(patterns[1:], values[1:], first)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_same_literal(wanted: Any, value: Any) -> bool:
    """Equal, where 1 is 1.0 but not True, and 0.0 is not -0.0."""
    if _is_number(wanted):
        return _is_number(value) and wanted == value and math.copysign(1, wanted) == math.copysign(1, value)
    if isinstance(wanted, (tuple, list)):
        return isinstance(value, (tuple, list)) and list(wanted) == list(value)
    return not isinstance(value, fx.Node) and type(wanted) is type(value) and bool(wanted == value)

"""Symbolic sizes: numbers such as `2*batch + 1` that are known only when a graph runs."""

import keyword
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from weft.errors import GraphError
from weft.torch_private import expression_of

__all__ = [
    "SMALLEST",
    "Condition",
    "Size",
    "condition_of",
    "places_of",
    "resolved",
    "shape_of",
    "size_of",
    "sizes_by_name",
    "sizes_in",
    "spec_of",
    "strides_of",
]

_FOLDS: Mapping[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": (" + ", operator.add),
    "mul": ("*", operator.mul),
    "floordiv": ("//", operator.floordiv),
    "mod": (" % ", operator.mod),
    "truediv": (" / ", operator.truediv),
    "max": ("max", max),
    "min": ("min", min),
}
_RELATIONS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "eq": ("==", operator.eq),
    "ne": ("!=", operator.ne),
    "lt": ("<", operator.lt),
    "le": ("<=", operator.le),
    "gt": (">", operator.gt),
    "ge": (">=", operator.ge),
}
_OF_TORCH = {
    "Add": "add",
    "Mul": "mul",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "Max": "max",
    "Min": "min",
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")
SMALLEST = 2
"""The least that a named size is: PyTorch treats sizes of 0 and 1 in their own ways (broadcasting, strides)."""


@dataclass(frozen=True)
class Size:
    """A name, or a calculation with sizes and numbers; prints as it would be written in Python.

    >>> Size("add", (Size("mul", (2, Size("name", ("batch",)))), 1))
    2*batch + 1
    """

    kind: str
    parts: tuple["Size | int | float | str", ...]

    def __post_init__(self) -> None:
        is_name = self.kind == "name" and len(self.parts) == 1 and isinstance(self.parts[0], str)
        is_fold = self.kind in _FOLDS and len(self.parts) > 1
        is_known = is_name or (is_fold and all(type(part) in (int, float, Size) for part in self.parts))
        if not is_known:
            raise GraphError(f"not a size ({self.kind}, parts: {len(self.parts)})")
        if is_name and (not _NAME.fullmatch(str(self.parts[0])) or keyword.iskeyword(str(self.parts[0]))):
            raise GraphError(f"a size goes by small letters, digits and underscores (name: {self.parts[0]!r})")

    def value(self, sizes: Mapping[str, Any]) -> Any:
        """The result for these sizes, which are whole numbers or symbols of another trace."""
        if self.kind == "name":
            return sizes[str(self.parts[0])]
        return reduce(_FOLDS[self.kind][1], (_value(part, sizes) for part in self.parts))

    @property
    def names(self) -> frozenset[str]:
        if self.kind == "name":
            return frozenset((str(self.parts[0]),))
        return frozenset(name for part in self.parts if isinstance(part, Size) for name in part.names)

    def __repr__(self) -> str:
        if self.kind == "name":
            return str(self.parts[0])
        sign = _FOLDS[self.kind][0]
        if self.kind in ("max", "min"):
            return f"{sign}({', '.join(map(str, self.parts))})"
        return sign.join(_in_brackets(part, self.kind) for part in self.parts).replace(" + -", " - ")


@dataclass(frozen=True)
class Condition:
    """A relation between sizes that a graph relies on, and the line of code that does."""

    relation: str
    left: Size | int
    right: Size | int
    line: str = ""

    def __post_init__(self) -> None:
        if self.relation not in _RELATIONS or not all(type(part) in (int, Size) for part in (self.left, self.right)):
            raise GraphError(f"not a condition ({self.relation})")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(n for part in (self.left, self.right) if isinstance(part, Size) for n in part.names)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        try:
            return _RELATIONS[self.relation][1](_value(self.left, sizes), _value(self.right, sizes))
        except ZeroDivisionError:
            return False

    def __str__(self) -> str:
        return f"{self.left} {_RELATIONS[self.relation][0]} {self.right}"


def size_of(value: Any) -> Any:
    """A size that a trace holds as a symbol, in names; a number stands for itself."""
    return value if type(value) in (int, float) else _translated(*expression_of(value))


def places_of(likes: Sequence[Tensor]) -> dict[str, tuple[int, int]]:
    """The place of each name: the first tensor of these that has it, and the dimension."""
    places: dict[str, tuple[int, int]] = {}
    for place, like in enumerate(likes):
        for dim, size in enumerate(like.shape):
            named = size_of(size)
            if isinstance(named, Size) and named.kind == "name":
                places.setdefault(str(named), (place, dim))
    return places


def sizes_by_name(likes: Sequence[Tensor]) -> dict[str, Any]:
    """The size that each name has in these tensors: a symbol where they are without values."""
    return {name: likes[place].shape[dim] for name, (place, dim) in places_of(likes).items()}


def resolved(value: Any, sizes: Mapping[str, Any]) -> Any:
    """The arguments of a call with every named size replaced by what it comes to."""
    return fx.node.map_aggregate(value, lambda item: item.value(sizes) if isinstance(item, Size) else item)


def condition_of(expression: Any, names: Mapping[Any, str], line: str) -> Condition:
    """A guard of a trace, in names."""
    relation = _OF_TORCH.get(type(expression).__name__, "")
    if relation not in _RELATIONS:
        raise GraphError(f"a size decides what cannot be stated as a condition ({expression}, {line})")
    left, right = (_translated(side, names) for side in expression.args)
    return Condition(relation, left, right, line)


def shape_of(tensor: Tensor) -> tuple[Size | int, ...]:
    return tuple(map(size_of, tensor.shape))


def strides_of(tensor: Tensor) -> tuple[Size | int, ...]:
    return tuple(map(size_of, tensor.stride()))


def spec_of(value: Any) -> Any:
    """Shape and type of a tensor, of each of several, or the type of what is none; comparing two asks no trace."""
    if isinstance(value, Tensor):
        return shape_of(value), value.dtype
    return [spec_of(item) for item in value] if isinstance(value, (tuple, list)) else type(value).__name__


def sizes_in(value: Any) -> Iterator[Size]:
    """Every named size among the arguments of a call."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Size))


def _value(part: Any, sizes: Mapping[str, Any]) -> Any:
    return part.value(sizes) if isinstance(part, Size) else part


def _in_brackets(part: Any, outer: str) -> str:
    binds_less = isinstance(part, Size) and part.kind in _FOLDS and part.kind not in ("max", "min")
    same = isinstance(part, Size) and part.kind == outer and outer in ("add", "mul")
    tight = outer == "add" and isinstance(part, Size) and part.kind != "add"
    return f"({part})" if binds_less and not same and not tight else str(part)


def _translated(expression: Any, names: Mapping[Any, str]) -> Any:
    kind = type(expression).__name__
    if expression.is_Integer:
        return int(expression)
    if expression.is_Float:
        return float(expression)
    if kind == "ToFloat":  # the numbers that it is calculated with make it a float in Python
        return _translated(expression.args[0], names)
    if expression.is_Symbol:
        return Size("name", (names[expression],))
    if expression.is_Pow or kind == "PowByNatural":
        base, exponent = expression.args
        if exponent.is_Integer and int(exponent) > 1:
            return Size("mul", (_translated(base, names),) * int(exponent))
    is_rounded_in_order = len(expression.args) == 2 or not any(part.is_Float for part in expression.args)
    if _OF_TORCH.get(kind) in _FOLDS and is_rounded_in_order:
        return Size(_OF_TORCH[kind], tuple(_translated(part, names) for part in _in_order(expression)))
    raise GraphError(f"a size is not made of others by + - * / // % min max ({expression})")


def _in_order(expression: Any) -> Any:
    """Parts of a sum with the number last, of a product with the number first, as people write them."""
    parts = list(expression.args)
    if type(expression).__name__ == "Add":
        parts.sort(key=lambda part: (bool(part.is_Integer), str(part)))
    elif type(expression).__name__ == "Mul":
        parts.sort(key=lambda part: (not part.is_Integer, str(part)))
    return parts

"""Sums: additions, subtractions and products with numbers, collected and written again.

    x + 1 - 2 + x        {x: 2} - 1           2x - 1
    x + a + y + b        {a, b, x, y}         (a + b) + x + y      where a and b are smaller than x and y
    (x + a) * 3 + b      {a: 3, b: 1, x: 3}   (b + 3a) + 3x

Small operands come first, so that large ones are gone over fewer times. A coefficient rides along in the `alpha` of an
addition.

Both forms add the same terms, so each is within m * eps * sum |c v| of the true sum, where m is the number of its
operations. Terms that cancel are gone, even where they are infinite.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.rewrites.chains import Chain, rewrite_chains, size_of
from weft.graph.rewrites.pattern import Call, Found, Var, add, arguments_of, mul, neg, sub
from weft.graph.rewrites.rule import Rule

__all__ = ["SUMS"]

aten = torch.ops.aten

Term = tuple[fx.Node, float]


def simplify_sums(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Collect equal terms and numbers, and add small operands first, where that is cheaper."""
    return rewrite_chains(nodes, _parts, _write)


SUMS = Rule("sums", simplify_sums, is_exact=False)


def _parts(node: fx.Node) -> list[tuple[Any, float]] | None:
    if node.target in (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.rsub.Tensor):
        x, y, by = arguments_of(node).values()
        if not isinstance(by, (int, float)):
            return None
        if node.target is aten.add.Tensor:
            return [(x, 1.0), (y, by)]
        return [(x, 1.0), (y, -by)] if node.target is aten.sub.Tensor else [(y, 1.0), (x, -by)]
    if node.target is aten.neg.default:
        return [(node.args[0], -1.0)]
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], (int, float)):
        number = node.args[1]
        if node.target is aten.mul.Tensor:
            return [(node.args[0], number)]
        return [(node.args[0], 1 / number)] if number else None
    return None


def _write(chain: Chain) -> Iterator[tuple[Call, Found]]:
    """Smallest operands first; or first one that needs no product, if there is one, which may save a call."""
    constant, coefficients = 0.0, dict[fx.Node, float]()
    for value, weight in chain.leaves:
        if isinstance(value, fx.Node):
            coefficients[value] = coefficients.get(value, 0.0) + weight
        else:
            constant += value * weight
    terms = sorted(((node, by) for node, by in coefficients.items() if by), key=lambda term: size_of(term[0]))
    if not terms or not all(map(math.isfinite, (constant, *(by for _, by in terms)))):
        return
    plain = [term for term in terms if term[1] == 1.0]
    for first in dict.fromkeys((terms[0], *plain[:1])):
        yield from _written([first, *(term for term in terms if term is not first)], constant)


def _written(terms: list[Term], constant: float) -> Iterator[tuple[Call, Found]]:
    names = {f"v{i}": node for i, (node, _) in enumerate(terms)}
    (first, by), *rest = zip(map(Var, names), (by for _, by in terms), strict=True)
    written: Any = first if by == 1.0 else neg(first) if by == -1.0 else mul(first, by)
    if constant:
        written = written + constant
    for variable, by in rest:
        if by == -1.0:
            written = sub(written, variable)
        else:
            written = add(written, variable, **({} if by == 1.0 else {"alpha": by}))
    if isinstance(written, Call):
        yield written, names

"""Sums and products written in a shorter way. These rules round differently.

    x + 1 - 2 + x        {x: 2} - 1           2x - 1
    x + a + y + b        {a, b, x, y}         (a + b) + x + y      where a and b are smaller than x and y
    (x + a) * 3 + b      {a: 3, b: 1, x: 3}   (b + 3a) + 3x
    x * 2 * y / 8        x, y, 0.25           (x * 0.25) * y
    x * a * y * b        a, b, x, y           ((a * b) * x) * y    where a and b are smaller than x and y
    x / a / b            x over a, b          x / (a * b)

Small operands come first, so that large ones are gone over fewer times. A coefficient rides along in the `alpha` of an
addition. Terms of a sum that cancel are gone, even where they are infinite; of products nothing is cancelled, since
x / x is NaN where x is 0.

Both forms of a sum add the same terms, so each is within m * eps * sum |c v| of the true sum, where m is the number of
its operations; each form of a product is within m * eps of the true one, relative to it, as long as nothing overflows
or underflows on the way. Distribution and factoring, whichever is cheaper for the shapes at hand, have the bound of
sums; the m of a matrix product is its inner size.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.rewrites.chains import Chain, num_elements, rewrite_chains
from weft.graph.rewrites.pattern import Call, Found, Var, add, arguments_of, mul, neg, only, sub
from weft.graph.rewrites.rule import Replacement, Rule, pattern_rule

__all__ = ["SIMPLIFICATIONS"]

aten = torch.ops.aten

Term = tuple[fx.Node, float]


def simplify_sums(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Collect equal terms and numbers, and add small operands first, where that is cheaper."""
    return rewrite_chains(nodes, _parts_of_sum, _write_sum)


def _parts_of_sum(node: fx.Node) -> list[tuple[Any, float]] | None:
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


def _write_sum(chain: Chain) -> Iterator[tuple[Call, Found]]:
    """Smallest operands first; or first one that needs no product, if there is one, which may save a call."""
    constant, coefficients = 0.0, dict[fx.Node, float]()
    for value, weight in chain.leaves:
        if isinstance(value, fx.Node):
            coefficients[value] = coefficients.get(value, 0.0) + weight
        else:
            constant += value * weight
    terms = sorted(((node, by) for node, by in coefficients.items() if by), key=lambda term: num_elements(term[0]))
    if not terms or not all(map(math.isfinite, (constant, *(by for _, by in terms)))):
        return
    plain = [term for term in terms if term[1] == 1.0]
    for first in dict.fromkeys((terms[0], *plain[:1])):
        yield from _write_terms([first, *(term for term in terms if term is not first)], constant)


def _write_terms(terms: list[Term], constant: float) -> Iterator[tuple[Call, Found]]:
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


def simplify_products(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Collect numbers and divisors, and multiply small operands first, where that is cheaper."""
    return rewrite_chains(nodes, _parts_of_product, _write_product)


def _parts_of_product(node: fx.Node) -> list[tuple[Any, float]] | None:
    """The weight of an operand is its power: 1 or -1."""
    if node.target is aten.mul.Tensor:
        return [(node.args[0], 1.0), (node.args[1], 1.0)]
    if node.target is aten.div.Tensor:
        return [(node.args[0], 1.0), (node.args[1], -1.0)]
    return [(node.args[0], 1.0), (-1.0, 1.0)] if node.target is aten.neg.default else None


def _write_product(chain: Chain) -> Iterator[tuple[Call, Found]]:
    numbers = [(value, power) for value, power in chain.leaves if not isinstance(value, fx.Node)]
    if any(value == 0 for value, _ in numbers):
        return
    constant = math.prod(value**power for value, power in numbers)
    nodes = sorted(((v, p) for v, p in chain.leaves if isinstance(v, fx.Node)), key=lambda leaf: num_elements(leaf[0]))
    if not math.isfinite(constant) or not any(power > 0 for _, power in nodes):
        return
    names = {f"v{i}": node for i, (node, _) in enumerate(nodes)}
    above = [Var(name) for name, (_, power) in zip(names, nodes, strict=True) if power > 0]
    below = [Var(name) for name, (_, power) in zip(names, nodes, strict=True) if power < 0]
    written: Any = above[0]
    if constant != 1.0:
        written = neg(written) if constant == -1.0 else written * constant
    for factor in above[1:]:
        written = written * factor
    if below:
        divisor: Any = below[0]
        for factor in below[1:]:
            divisor = divisor * factor
        written = written / divisor
    if isinstance(written, Call):
        yield written, names


x, y, z, w = Var("x"), Var("y"), Var("z"), Var("w")


def _row(name: str, pattern: Call, replacement: Replacement) -> Rule:
    return pattern_rule(name, pattern, replacement, is_exact=False, is_cheaper=True)


SIMPLIFICATIONS: tuple[Rule, ...] = (
    Rule("sums", simplify_sums, is_exact=False),
    Rule("products", simplify_products, is_exact=False),
    _row("common factor of a sum", only(x * y) + only(x * z), x * (y + z)),
    _row("common factor of a difference", only(x * y) - only(x * z), x * (y - z)),
    _row("common divisor of a sum", only(y / x) + only(z / x), (y + z) / x),
    _row("common divisor of a difference", only(y / x) - only(z / x), (y - z) / x),
    _row("factor of a sum with itself", only(x * y) + x, x * (y + 1.0)),
    _row("shift under a scale", only(only(x + y) * z) + w, add(x * z, y * z + w)),
    _row("common left matrix", only(x @ y) + only(x @ z), x @ (y + z)),
    _row("common right matrix", only(y @ x) + only(z @ x), (y + z) @ x),
)

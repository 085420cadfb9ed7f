"""Products: multiplications, divisions and negations, collected and written again.

    x * 2 * y / 8        x, y, 0.25           (x * 0.25) * y
    x * a * y * b        a, b, x, y           ((a * b) * x) * y    where a and b are smaller than x and y
    x / a / b            x over a, b          x / (a * b)

Nothing is cancelled: x / x is NaN where x is 0. Each form is within m * eps of the true product, relative to it, where
m is the number of its operations, as long as nothing overflows or underflows on the way.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.rewrites.chains import Chain, rewrite_chains, size_of
from weft.graph.rewrites.pattern import Call, Found, Var, neg
from weft.graph.rewrites.rule import Rule

__all__ = ["PRODUCTS"]

aten = torch.ops.aten


def simplify_products(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Collect numbers and divisors, and multiply small operands first, where that is cheaper."""
    return rewrite_chains(nodes, _parts, _write)


PRODUCTS = Rule("products", simplify_products, is_exact=False)


def _parts(node: fx.Node) -> list[tuple[Any, float]] | None:
    """The weight of an operand is its power: 1 or -1."""
    if node.target is aten.mul.Tensor:
        return [(node.args[0], 1.0), (node.args[1], 1.0)]
    if node.target is aten.div.Tensor:
        return [(node.args[0], 1.0), (node.args[1], -1.0)]
    return [(node.args[0], 1.0), (-1.0, 1.0)] if node.target is aten.neg.default else None


def _write(chain: Chain) -> Iterator[tuple[Call, Found]]:
    numbers = [(value, power) for value, power in chain.leaves if not isinstance(value, fx.Node)]
    if any(value == 0 for value, _ in numbers):
        return
    constant = math.prod(value**power for value, power in numbers)
    nodes = sorted(((v, p) for v, p in chain.leaves if isinstance(v, fx.Node)), key=lambda leaf: size_of(leaf[0]))
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

"""Exact algebra: identities of IEEE arithmetic, each with the reason why no bit changes.

What is missing here is missing for a reason: x + 0 turns -0.0 into 0.0, x - x is NaN for an infinite x, -(x - y) and
y - x are zeros of different signs where x equals y.
"""

import math

import torch
from torch import fx

from weft.graph.rewrites.pattern import Anything, Call, Found, Number, Op, Var, neg
from weft.graph.rewrites.rule import Rule, pattern_rule

__all__ = ["ALGEBRA"]

aten = torch.ops.aten

to_type = Op((aten._to_copy.default,))
absolute = Op((aten.abs.default,))
clone = Op((aten.clone.default,))
relu = Op((aten.relu.default,))
where = Op((aten.where.self,))


def _is_real(node: fx.Node) -> bool:
    """A complex product or quotient is several real ones, among which an infinity times zero is NaN."""
    return not node.meta["val"].is_complex()


x, y, any_x, condition = Var("x", _is_real), Var("y", _is_real), Var("x"), Var("condition")
k, narrow, wide, layout = Number("k"), Anything("narrow"), Anything("wide"), Anything("layout")


def _times_reciprocal(found: Found) -> Call | None:
    """A product with 1/k. Where 1/k is a float, and not a subnormal one, both ways round the same real number once."""
    k, value = found["k"], found["x"].meta["val"]
    is_power_of_two = k != 0 and math.isfinite(k) and abs(math.frexp(k)[0]) == 0.5
    if not is_power_of_two or not value.is_floating_point():
        return None
    smallest = torch.finfo(value.dtype).tiny
    return x * (1 / k) if smallest <= abs(k) <= 1 / smallest else None


def _there_and_back(found: Found) -> Var | None:
    """Every float of the narrow type is one of the wide type, and rounding it back finds it again."""
    types = found["narrow"], found["wide"]
    if found["x"].meta["val"].dtype != types[0] or not all(dtype.is_floating_point for dtype in types):
        return None
    near, far = map(torch.finfo, types)
    return any_x if far.eps <= near.eps and far.max >= near.max and far.tiny <= near.tiny else None


ALGEBRA: tuple[Rule, ...] = (
    # A product or quotient with 1 is the number itself; a signalling NaN, which ATen never makes, would turn quiet.
    pattern_rule("times one", x * 1, x),
    pattern_rule("divided by one", x / 1, x),
    # -0.0 is the neutral element of addition, 0.0 that of what is subtracted.
    pattern_rule("minus zero", x - 0.0, x),
    pattern_rule("plus minus zero", x + -0.0, x),
    # A negation flips one bit; IEEE defines x - y as x + (-y), and the sign of a product apart from its magnitude.
    pattern_rule("double negation", neg(neg(x)), x),
    pattern_rule("times minus one", x * -1, -x),
    pattern_rule("plus a negation", x + -y, x - y),
    pattern_rule("minus a negation", x - -y, x + y),
    pattern_rule("product of negations", -x * -y, x * y),
    pattern_rule("quotient of negations", -x / -y, x / y),
    pattern_rule("magnitude of a negation", absolute(-x), absolute(x)),
    # Applied again to what they give, these give the same.
    pattern_rule("magnitude of a magnitude", absolute(absolute(x)), absolute(x)),
    pattern_rule("relu of relu", relu(relu(x)), relu(x)),
    pattern_rule("divided by a power of two", x / k, _times_reciprocal),
    pattern_rule("to a wider type and back", to_type(to_type(any_x, dtype=wide), dtype=narrow), _there_and_back),
    # Nothing in a graph writes to memory, so a copy is as good as the original; results keep theirs.
    pattern_rule("copies", clone(any_x, memory_format=layout), any_x),
    pattern_rule("choice between equals", where(condition, any_x, any_x), any_x),
)

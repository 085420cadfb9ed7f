"""Distribution and factoring, whichever of the two is cheaper for the shapes at hand.

Both sides of a row are sums of the same products; each is within m * eps * sum |products| of the true value, where m
is the number of its operations (of a matrix product: the inner size).
"""

from weft.graph.rewrites.pattern import Call, Var, add, only
from weft.graph.rewrites.replacement import Replacement, pattern_rule
from weft.graph.rewrites.rule import Rule

__all__ = ["FACTORING"]

x, y, z, w = Var("x"), Var("y"), Var("z"), Var("w")


def _row(name: str, pattern: Call, replacement: Replacement) -> Rule:
    return pattern_rule(name, pattern, replacement, is_exact=False, is_cheaper=True)


FACTORING: tuple[Rule, ...] = (
    _row("common factor of a sum", only(x * y) + only(x * z), x * (y + z)),
    _row("common factor of a difference", only(x * y) - only(x * z), x * (y - z)),
    _row("common divisor of a sum", only(y / x) + only(z / x), (y + z) / x),
    _row("common divisor of a difference", only(y / x) - only(z / x), (y - z) / x),
    _row("factor of a sum with itself", only(x * y) + x, x * (y + 1.0)),
    _row("shift under a scale", only(only(x + y) * z) + w, add(x * z, y * z + w)),
    _row("common left matrix", only(x @ y) + only(x @ z), x @ (y + z)),
    _row("common right matrix", only(y @ x) + only(z @ x), (y + z) @ x),
)

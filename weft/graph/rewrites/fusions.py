"""Static fusion: two operators for which ATen has one kernel.

The kernel rounds once less, or adds up in another order: each side is within m * eps * sum |products| of the true
value, where m is the number of operations for one element.
"""

import torch
from torch import fx

from weft.graph.rewrites.pattern import Call, Found, Number, Op, Var, add, mm, only
from weft.graph.rewrites.replacement import pattern_rule
from weft.graph.rewrites.rule import Rule

__all__ = ["STATIC_FUSIONS"]

aten = torch.ops.aten

addmm, addcmul, addcdiv = Op((aten.addmm.default,)), Op((aten.addcmul.default,)), Op((aten.addcdiv.default,))

x, y, z, k = Var("x"), Var("y"), Var("z"), Number("k")


def _row(name: str, pattern: Call, replacement: Call) -> Rule:
    """A row for operands of one floating type: these kernels do not promote."""

    def of_one_type(found: Found) -> Call | None:
        types = {value.meta["val"].dtype for value in found.values() if isinstance(value, fx.Node)}
        return replacement if len(types) == 1 and types.pop().is_floating_point else None

    return pattern_rule(name, pattern, of_one_type, is_exact=False, is_cheaper=True)


STATIC_FUSIONS: tuple[Rule, ...] = (
    _row("product plus matrix", only(mm(x, y)) + z, addmm(z, x, y)),
    _row("matrix plus scaled product", add(z, only(mm(x, y)), alpha=k), addmm(z, x, y, alpha=k)),
    _row("product plus scaled matrix", add(only(mm(x, y)), z, alpha=k), addmm(z, x, y, beta=k)),
    _row("matrix minus product", z - only(mm(x, y)), addmm(z, x, y, alpha=-1)),
    _row("product minus matrix", only(mm(x, y)) - z, addmm(z, x, y, beta=-1)),
    _row("sum with a product", z + only(x * y), addcmul(z, x, y)),
    _row("sum with a scaled product", add(z, only(x * y), alpha=k), addcmul(z, x, y, value=k)),
    _row("difference from a product", z - only(x * y), addcmul(z, x, y, value=-1)),
    _row("sum with a quotient", z + only(x / y), addcdiv(z, x, y)),
    _row("sum with a scaled quotient", add(z, only(x / y), alpha=k), addcdiv(z, x, y, value=k)),
    _row("difference from a quotient", z - only(x / y), addcdiv(z, x, y, value=-1)),
)

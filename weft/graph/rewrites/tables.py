"""The tables of rules: exact ones, and those that round differently."""

from weft.graph.rewrites.algebra import ALGEBRA
from weft.graph.rewrites.constants import CONSTANTS
from weft.graph.rewrites.convolutions import CONVOLUTIONS
from weft.graph.rewrites.dead import DEAD
from weft.graph.rewrites.factoring import FACTORING
from weft.graph.rewrites.fusions import STATIC_FUSIONS
from weft.graph.rewrites.products import PRODUCTS
from weft.graph.rewrites.repeated import REPEATED
from weft.graph.rewrites.rule import Rule
from weft.graph.rewrites.sums import SUMS
from weft.graph.rewrites.views import VIEWS

__all__ = ["EXACT", "FUSIONS", "REASSOCIATING", "SIMPLIFICATIONS"]

EXACT: tuple[Rule, ...] = (DEAD, *VIEWS, CONSTANTS, REPEATED, *ALGEBRA)
"""On by default: every bit stays as it was."""

SIMPLIFICATIONS: tuple[Rule, ...] = (SUMS, PRODUCTS, *FACTORING)
"""Sums and products written in a shorter way."""

FUSIONS: tuple[Rule, ...] = (*STATIC_FUSIONS, *CONVOLUTIONS)
"""Two operators in one, for which ATen has a kernel. They come last, since they hide sums and products."""

REASSOCIATING: tuple[Rule, ...] = (*SIMPLIFICATIONS, *FUSIONS)

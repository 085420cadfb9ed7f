"""Rewrites: fewer or cheaper operators, the same values. Rules are tables of patterns; one driver applies them."""

from weft.graph.rewrites.driver import EXACT, REASSOCIATING, rewrite
from weft.graph.rewrites.rule import Edit, Rule, pattern_rule

__all__ = ["EXACT", "REASSOCIATING", "Edit", "Rule", "pattern_rule", "rewrite"]

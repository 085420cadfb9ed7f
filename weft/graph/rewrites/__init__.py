"""Rewrites: fewer or cheaper operators, the same values. Rules are tables of patterns; one driver applies them."""

from weft.graph.rewrites.dead import remove_dead
from weft.graph.rewrites.driver import rewrite
from weft.graph.rewrites.replacement import pattern_rule
from weft.graph.rewrites.rule import Edit, Rule
from weft.graph.rewrites.tables import EXACT, REASSOCIATING

__all__ = ["EXACT", "REASSOCIATING", "Edit", "Rule", "pattern_rule", "remove_dead", "rewrite"]

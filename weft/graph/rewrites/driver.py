"""The driver: tables of rules, one after the other, each again and again until no rule of it finds anything."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from weft.errors import GraphError
from weft.graph.ir.graph import Graph
from weft.graph.ir.verification import check_pass
from weft.graph.rewrites.algebra import ALGEBRA
from weft.graph.rewrites.cleanup import CONSTANTS, DEAD, REPEATED
from weft.graph.rewrites.fused_kernels import FUSIONS
from weft.graph.rewrites.rule import Rule
from weft.graph.rewrites.sums_and_products import SIMPLIFICATIONS
from weft.graph.rewrites.views import VIEWS

__all__ = ["EXACT", "REASSOCIATING", "rewrite"]

EXACT: tuple[Rule, ...] = (DEAD, *VIEWS, CONSTANTS, REPEATED, *ALGEBRA)
"""On by default: every bit stays as it was."""

REASSOCIATING: tuple[Rule, ...] = (*SIMPLIFICATIONS, *FUSIONS)
"""Rules that round differently. Fusions come last, since they hide sums and products."""


_MOST_ROUNDS = 200  # a rule that undoes another would go on for ever


def rewrite(
    graph: Graph, rules: Sequence[Rule] | None = None, *, reassociate: bool = False, check_each: bool = False
) -> Graph:
    """Apply all rules of a table, again and again until none finds anything; returns a new graph.

    Args:
        rules: the table; by default the exact rules, after which every bit is as it was.
        reassociate: also apply the rules that round differently. They take numbers for real ones: what overflows, or
            is infinite or NaN on the way, may come out otherwise.
        check_each: check the graph after every rule that changed it, not only at the end, and name the rule at fault.

    Raises:
        GraphError: a rule made a graph that is not valid, or that returns or draws something else.
    """
    if rules is None:
        phases = [EXACT, (*EXACT, *SIMPLIFICATIONS), (*EXACT, *FUSIONS)] if reassociate else [EXACT]
    elif reassociate:
        raise GraphError("rules were given, and reassociate too; give one of them")
    else:
        phases = [tuple(rules)]
    edited, constants = graph.edited(), dict(graph.constants)
    for phase in phases:
        for _ in range(_MOST_ROUNDS):
            if not _apply(graph, edited, constants, phase, check_each):
                break
        else:
            raise AssertionError(f"rules undo each other: {', '.join(rule.name for rule in phase)}")
    after = _with_constants(edited, constants)
    check_pass(graph, after)
    return after


def _apply(graph: Graph, edited: Graph, constants: dict[str, Tensor], rules: Sequence[Rule], check_each: bool) -> int:
    """Every rule once; how many changes they made."""
    total = 0
    for rule in rules:
        changes = rule.edit(edited.nodes, constants)
        total += changes
        if check_each and changes:
            try:
                check_pass(graph, _with_constants(edited, constants))
            except GraphError as error:
                raise GraphError(f"rule breaks the graph (rule: {rule.name}): {error}") from error
    return total


def _with_constants(edited: Graph, constants: dict[str, Tensor]) -> Graph:
    used = {str(node.target) for node in edited.nodes.nodes if node.op == "get_attr"}
    return replace(edited, constants={name: value for name, value in constants.items() if name in used})

"""A graph fused, planned and made runnable: by kernels that have its bits, or by Inductor's, which may round."""

from pathlib import Path

from weft.graph.exact import bind_kernel, fuse_exactly
from weft.graph.fusion import fuse
from weft.graph.graph import Graph
from weft.graph.planned.arena import Arena
from weft.graph.planned.program import PlannedProgram
from weft.graph.planned.regions import compile_into
from weft.graph.planned.terms import Terms

__all__ = ["fused_program"]


def fused_program(
    graph: Graph, terms: Terms, *, may_round: bool, arena: Arena | None = None, folder: Path | None = None
) -> PlannedProgram:
    """A program of the graph, or of one that differs from it by rounding where it `may_round`."""
    if may_round:
        return PlannedProgram(fuse(graph), terms, compile=compile_into, arena=arena, folder=folder)
    return PlannedProgram(fuse_exactly(graph), terms, compile=bind_kernel, arena=arena, folder=folder)

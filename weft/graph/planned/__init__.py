"""Generated Python with a memory plan: storage reused within a step and between steps, calls without detours."""

from weft.graph.planned.arena import Arena
from weft.graph.planned.fused import fused_program
from weft.graph.planned.program import PlannedProgram
from weft.graph.planned.terms import Terms

__all__ = ["Arena", "PlannedProgram", "Terms", "fused_program"]

"""Generated Python with a memory plan: storage reused within a step and between steps, calls without detours."""

from weft.graph.memory_plan.arena import Arena
from weft.graph.memory_plan.planned_program import PlannedProgram, fused_program
from weft.graph.memory_plan.signature import Signature

__all__ = ["Arena", "PlannedProgram", "Signature", "fused_program"]

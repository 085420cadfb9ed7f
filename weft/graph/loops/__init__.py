"""Loops inside a graph, and the memory of their gradients."""

from weft.graph.loops.checkpoint_schedule import draw_schedule
from weft.graph.loops.loop import loop

__all__ = ["draw_schedule", "loop"]

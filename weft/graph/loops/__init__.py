"""Loops inside a graph, and the memory of their gradients."""

from weft.graph.loops.loop import loop
from weft.graph.loops.revolve import draw_schedule

__all__ = ["draw_schedule", "loop"]

"""Level 1: the training step, and what executes it."""

from weft.graph.eager import EagerExecutor
from weft.graph.executor import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.graph.reference import ReferenceExecutor

__all__ = [
    "AbstractExecutor",
    "EagerExecutor",
    "GradientSink",
    "Loss",
    "Outputs",
    "ReferenceExecutor",
    "State",
]

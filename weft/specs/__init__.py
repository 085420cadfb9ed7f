"""Frozen descriptions that every level shares."""

from weft.specs.plan import Choice, Plan, parse_plan
from weft.specs.tensors import IGNORED, Batch, TaskSpec, TensorSpec

__all__ = ["IGNORED", "Batch", "Choice", "Plan", "TaskSpec", "TensorSpec", "parse_plan"]

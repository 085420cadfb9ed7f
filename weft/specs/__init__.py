"""Frozen descriptions that every level shares."""

from weft.specs.mesh import Axis, Mesh
from weft.specs.parsing import as_plan, parse_plan
from weft.specs.plan import Choice, Plan
from weft.specs.roles import Roles
from weft.specs.tensors import IGNORED, Batch, TaskSpec, TensorSpec

__all__ = [
    "IGNORED",
    "Axis",
    "Batch",
    "Choice",
    "Mesh",
    "Plan",
    "Roles",
    "TaskSpec",
    "TensorSpec",
    "as_plan",
    "parse_plan",
]

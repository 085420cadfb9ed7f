"""Frozen descriptions that every level shares."""

from weft.specs.devices import CPU, find_device, list_devices
from weft.specs.mesh import Axis, Mesh
from weft.specs.parsing import as_plan, parse_plan, parse_plan_for
from weft.specs.plan import Choice, Plan
from weft.specs.roles import Roles
from weft.specs.tensors import IGNORED, Batch, TaskSpec, TensorSpec

__all__ = [
    "CPU",
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
    "find_device",
    "list_devices",
    "parse_plan",
    "parse_plan_for",
]

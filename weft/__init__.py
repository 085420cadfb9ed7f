"""Weft trains a PyTorch model in parallel in every way the field knows, and proves that the result is right."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from weft.distributed.script.saving import load, read_state_dict, save, state_dict
    from weft.distributed.script.weave import weave
    from weft.errors import WeftError
    from weft.graph import capture, loop
    from weft.metrics.measure import Measurements, measure, measured, measurements
    from weft.metrics.metric import Rule
    from weft.specs import Plan, parse_plan
    from weft.training.component import Component
    from weft.training.recipe import Fixed, Mutable, Recipe

__all__ = [
    "Component",
    "Fixed",
    "Measurements",
    "Mutable",
    "Plan",
    "Recipe",
    "Rule",
    "WeftError",
    "capture",
    "load",
    "loop",
    "measure",
    "measured",
    "measurements",
    "parse_plan",
    "read_state_dict",
    "save",
    "state_dict",
    "weave",
]

# Imported when first used: `weft --help` must not wait for torch.
_HOMES = {
    "Component": "weft.training.component",
    "Fixed": "weft.training.recipe",
    "Measurements": "weft.metrics.measure",
    "Mutable": "weft.training.recipe",
    "Plan": "weft.specs",
    "Recipe": "weft.training.recipe",
    "Rule": "weft.metrics.metric",
    "WeftError": "weft.errors",
    "capture": "weft.graph",
    "load": "weft.distributed.script.saving",
    "loop": "weft.graph",
    "measure": "weft.metrics.measure",
    "measured": "weft.metrics.measure",
    "measurements": "weft.metrics.measure",
    "parse_plan": "weft.specs",
    "read_state_dict": "weft.distributed.script.saving",
    "save": "weft.distributed.script.saving",
    "state_dict": "weft.distributed.script.saving",
    "weave": "weft.distributed.script.weave",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(_importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Weft trains a PyTorch model in parallel in every way the field knows, and proves that the result is right."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from weft.distributed.script.calls.over_ranks import barrier, broadcast, gather, mean, print, sum
    from weft.distributed.script.data.evaluation import evaluation
    from weft.distributed.script.data.sharing import share
    from weft.distributed.script.saving.saving import export, load, read_state_dict, save, state_dict
    from weft.distributed.script.weaving.blocks import consensus, no_sync
    from weft.distributed.script.weaving.passes import forward, forward_backward
    from weft.distributed.script.weaving.weave import weave
    from weft.errors import WeftError
    from weft.graph import capture, loop
    from weft.metrics.measure import Measurements, measure, measured, measurements
    from weft.metrics.metric import Rule
    from weft.specs import Plan, parse_plan
    from weft.training.component import Component
    from weft.training.models.experts import MixtureOfExperts, auxiliary_loss
    from weft.training.recipe import Fixed, Mutable, Recipe

    rank: int
    num_ranks: int
    is_first: bool

__all__ = [
    "Component",
    "Fixed",
    "Measurements",
    "MixtureOfExperts",
    "Mutable",
    "Plan",
    "Recipe",
    "Rule",
    "WeftError",
    "auxiliary_loss",
    "barrier",
    "broadcast",
    "capture",
    "consensus",
    "evaluation",
    "export",
    "forward",
    "forward_backward",
    "gather",
    "is_first",
    "load",
    "loop",
    "mean",
    "measure",
    "measured",
    "measurements",
    "no_sync",
    "num_ranks",
    "parse_plan",
    "print",
    "rank",
    "read_state_dict",
    "save",
    "share",
    "state_dict",
    "sum",
    "weave",
]

# Imported when first used: `weft --help` must not wait for torch.
_HOMES = {
    "Component": "weft.training.component",
    "Fixed": "weft.training.recipe",
    "Measurements": "weft.metrics.measure",
    "MixtureOfExperts": "weft.training.models.experts",
    "Mutable": "weft.training.recipe",
    "Plan": "weft.specs",
    "Recipe": "weft.training.recipe",
    "Rule": "weft.metrics.metric",
    "WeftError": "weft.errors",
    "auxiliary_loss": "weft.training.models.experts",
    "barrier": "weft.distributed.script.calls.over_ranks",
    "broadcast": "weft.distributed.script.calls.over_ranks",
    "capture": "weft.graph",
    "consensus": "weft.distributed.script.weaving.blocks",
    "evaluation": "weft.distributed.script.data.evaluation",
    "export": "weft.distributed.script.saving.saving",
    "forward": "weft.distributed.script.weaving.passes",
    "forward_backward": "weft.distributed.script.weaving.passes",
    "gather": "weft.distributed.script.calls.over_ranks",
    "load": "weft.distributed.script.saving.saving",
    "loop": "weft.graph",
    "mean": "weft.distributed.script.calls.over_ranks",
    "measure": "weft.metrics.measure",
    "measured": "weft.metrics.measure",
    "measurements": "weft.metrics.measure",
    "no_sync": "weft.distributed.script.weaving.blocks",
    "parse_plan": "weft.specs",
    "print": "weft.distributed.script.calls.over_ranks",
    "read_state_dict": "weft.distributed.script.saving.saving",
    "save": "weft.distributed.script.saving.saving",
    "share": "weft.distributed.script.data.sharing",
    "state_dict": "weft.distributed.script.saving.saving",
    "sum": "weft.distributed.script.calls.over_ranks",
    "weave": "weft.distributed.script.weaving.weave",
}
# Of this rank, asked anew each time.
_OF_RANK = ("is_first", "num_ranks", "rank")


def __getattr__(name: str) -> _typing.Any:
    if name in _OF_RANK:
        return getattr(_importlib.import_module("weft.distributed.script.world.world").find_world(), name)
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(_importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

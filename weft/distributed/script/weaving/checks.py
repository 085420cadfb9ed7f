"""The arguments of `weave`, checked in one process as on many ranks."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, get_args

import torch
from torch import nn

from weft.distributed.script.weaving.incoming import Loss
from weft.distributed.script.weaving.names import name_parameters, parameters_of
from weft.distributed.script.weaving.weaving import weavings_of
from weft.distributed.script.world.world import World
from weft.errors import PlanError, UsageError, nearest
from weft.specs import CPU, Plan, parse_plan_for
from weft.specs.axes import DEGREES

__all__ = [
    "as_list",
    "check_models",
    "check_new",
    "check_optimizers",
    "check_words",
    "device_of",
    "plan_for",
]

BATCH_NORMS = ("local", "global")

MOST_TRIED = 17
"""Ranks for which a plan is tried that says nothing of how many."""


def as_list(given: Any) -> list[Any]:
    """One or several, or none.

    >>> as_list(None), as_list(1), as_list((1, 2))
    ([], [1], [1, 2])
    """
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def check_models(models: Sequence[Any]) -> None:
    if not models:
        raise UsageError("weave was given no model; the first argument is a module, or a list of them")
    for model in models:
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"model is no module of torch.nn ({type(model).__name__}); weave(model, optimizer, loader)"
            )
    if len(set(map(id, models))) < len(models):
        raise UsageError("weave was given the same model twice; give each once")


def check_optimizers(optimizers: Sequence[Any], models: Sequence[nn.Module]) -> None:
    parameters = name_parameters(models)
    owners: dict[str, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            about = type(optimizer).__name__
            raise UsageError(f"optimizer is none of torch.optim ({about}); weave(model, optimizer, loader), or None")
        for name in parameters_of(optimizer, parameters):
            if owners.setdefault(name, optimizer) is not optimizer:
                raise UsageError(f"two optimizers update the same parameter ({name}); give each parameter to one")
        if owners and not any(owner is optimizer for owner in owners.values()):
            raise UsageError("weave was given the same optimizer twice; give each once")


def check_words(loss: str, weight: Callable[[Any], Any] | None, batch_norm: str) -> None:
    for name, word, known in (("loss", loss, get_args(Loss)), ("batch_norm", batch_norm, BATCH_NORMS)):
        if word not in known:
            raise UsageError(f"unknown {name} ({name}: {word!r}); {nearest(str(word), known)}")
    if weight is not None and not callable(weight):
        raise UsageError(f"weight is no function of a batch ({weight!r}); give one that returns a number of items")
    if weight is not None and loss == "sum":
        raise UsageError("a loss that is a sum needs no weight; leave one of the two out")


def check_new(world: World, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Nothing is woven twice."""
    for weaving in weavings_of(world):
        if any(known is model for known in weaving.models for model in models):
            raise UsageError("model is woven already, and would be exchanged twice; weave each once")
        if any(known is optimizer for known in weaving.optimizers for optimizer in optimizers):
            raise UsageError("optimizer is woven already, and would step twice; weave each once")


def plan_for(plan: Plan | str, world: World) -> Plan:
    """The plan of the command, or else of the script; of one that says "data" without a number, in one process, that
    for the fewest ranks that it makes sense for."""
    if world.plan is not None:
        return world.plan
    num_ranks = world.num_ranks
    if num_ranks == 1 and any(word in DEGREES for word in str(plan).split()):
        return _plan_for_some(plan)
    wanted = parse_plan_for(plan, num_ranks)
    if wanted.num_ranks != num_ranks:
        numbers = f"plan: {wanted.num_ranks}, ranks: {num_ranks}"
        raise PlanError(f"plan needs another number of ranks than were started ({numbers}); use plan='data'")
    if wanted.roles.num_processes != num_ranks:
        about = f"plan: {wanted}, processes: {wanted.roles.num_processes}, started: {num_ranks}"
        raise PlanError(
            f"plan has processes that are no ranks, which the script learns too late ({about}); "
            "give it to the command: weft launch --plan"
        )
    return wanted


def _plan_for_some(plan: Plan | str) -> Plan:
    for num_ranks in range(2, MOST_TRIED):
        with suppress(PlanError):
            return parse_plan_for(plan, num_ranks)
    return parse_plan_for(plan, 2)  # which says why


def device_of(models: Sequence[nn.Module]) -> torch.device:
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    devices = {tensor.device for tensor in tensors} or {CPU}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"model lies on several devices ({names}); move it to one with model.to(device)")
    return devices.pop()

"""Ranks that are one replica together: they begin with the same model, and draw the same random numbers.

    forward    rank 0 of a replica  -- the state of its generator -->  the others        then all draw the same masks

A script may draw on one rank alone, as a loader's order is: so states are compared in every forward of training.
"""

from typing import Any

import torch
from torch import nn

from weft.distributed.group.group import AbstractGroup
from weft.distributed.script.weaving.own_hooks import OwnHook
from weft.distributed.script.weaving.weaving import Weaving, broadcast_in_host_memory
from weft.graph.executors.random_state import get_random_state, set_random_state
from weft.specs.mesh import REPLICATED

__all__ = ["begin_alike"]


def begin_alike(weaving: Weaving) -> None:
    """Every rank gets rank 0's whole model, before it takes its part; and where a replica is several ranks, these draw
    alike. A collective call."""
    world = weaving.world
    broadcast_in_host_memory(world.group, [*weaving.parameters.values(), *weaving.buffers.values()])
    if world.mesh.num_replicas == world.num_ranks:
        return
    mesh = world.mesh
    replica = world.group.split(mesh.number(REPLICATED), world.rank)
    for model in weaving.models:
        _draw_alike(model, replica, weaving)


def _draw_alike(model: nn.Module, replica: AbstractGroup, weaving: Weaving) -> None:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def take_over(module: nn.Module, *_: Any) -> None:
        if not module.training:
            return
        state = get_random_state(device)
        with weaving.world.waiting("random numbers of a forward", replica):
            replica.broadcast(state)
        if replica.rank > 0:
            set_random_state(state, device)

    handle = model.register_forward_pre_hook(OwnHook(take_over))
    weaving.attached.append((model._forward_pre_hooks, handle.id))

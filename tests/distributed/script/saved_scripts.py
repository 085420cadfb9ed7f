"""What tests of `save` and `load` train and save, on virtual ranks that are each a world of a script."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.distributed.group import AbstractGroup
from weft.distributed.realise import RunSpec, realise
from weft.distributed.script.world import World, find_world, parse_plan_for, use_world
from weft.distributed.virtual import run_virtual
from weft.graph import State
from weft.simulation.computation import ComputeModel
from weft.simulation.place import VirtualPlace


def on_ranks(script: Callable[[], Any], size: int) -> list[Any]:
    """What a script returns on each virtual rank."""

    def program(group: AbstractGroup) -> Any:
        with use_world(World(VirtualPlace(group, (), ComputeModel(0.0, 0.0, 0.0, {}), {}))):
            return script()

    return list(run_virtual(program, size).results)


class HandWoven:
    """A model and an optimizer under a plan."""

    def __init__(self, replicas: Any, plan: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.replicas, self.plan = replicas, plan
        self.models, self.optimizers, self.loader = (model,), (optimizer,), None
        self.parameters = dict(model.named_parameters())
        self.num_steps = 0
        replicas.join(State(self.parameters, dict(model.named_buffers()), torch.empty(0)))
        replicas.placement.take_over(optimizer, self.parameters)

    @contextmanager
    def use_consensus(self) -> Iterator[None]:
        self._own = {name: p.detach().clone() for name, p in self.parameters.items()}
        with self.replicas.use_consensus(State(self.parameters, dict(self.models[0].named_buffers()), torch.empty(0))):
            yield
        self._own = {}

    def own_weights(self) -> Mapping[str, Tensor]:
        return self._own or self.parameters

    def leave_consensus(self) -> None:
        pass


@contextmanager
def use_woven(plan: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[HandWoven]:
    world = find_world()
    parsed = parse_plan_for(plan, world.num_ranks)
    with realise(parsed, world.place, RunSpec(whole_gradients=True)) as replicas:
        woven = HandWoven(replicas, parsed, model, optimizer)
        world.weavings.append(woven)
        yield woven

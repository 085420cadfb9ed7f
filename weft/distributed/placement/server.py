"""The same mathematics through parameter servers: gradients go to an owner, parameters come back.

rank 0 = shard 0 owns w1, b3     every rank: reduce each gradient to its owner
rank 1 = shard 1 owns w2, b1     the owner:  update what it owns, with its own part of the optimizer state
rank 2                           every rank: receive each parameter from its owner
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import Broadcast, Reduce
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.exchange import AbstractExchange, report_loss
from weft.training.gradients import clip_factor
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic, Update

__all__ = ["ServerExchange", "assign_owners"]


def assign_owners(parameters: Mapping[str, Tensor], num_shards: int) -> dict[str, int]:
    """Each parameter to the shard with the fewest bytes so far, largest parameter first: even within one tensor."""
    load = [0] * num_shards
    owners: dict[str, int] = {}
    for name, parameter in sorted(parameters.items(), key=lambda item: (-item[1].nbytes, item[0])):
        owners[name] = load.index(min(load))
        load[owners[name]] += parameter.nbytes
    return {name: owners[name] for name in parameters}


@final
class ServerExchange(AbstractExchange):
    """Shard s is rank s. Over a group that reduces in the order of ranks, bitwise the all-reduce run."""

    def __init__(self, group: AbstractGroup, parameters: Mapping[str, Tensor], num_shards: int) -> None:
        self._group = group
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._owners = assign_owners(self._parameters, num_shards)
        gradient_bytes = sum(parameter.nbytes for parameter in self._parameters.values())
        owned_bytes = sum(self._parameters[n].nbytes for n, owner in self._owners.items() if owner == group.rank)
        self._num_bytes = gradient_bytes + owned_bytes
        self._traffic = Traffic()
        self.begin(1.0)

    def begin(self, weight: float) -> None:
        self._weight = weight
        self._gradients: dict[str, Tensor | None] = {}

    def add(self, name: str, gradient: Tensor | None) -> None:
        self._gradients[name] = gradient

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        started = self._group.clock.now()
        total, is_present = report_loss(self._group, loss, self._gradients, list(self._parameters))
        present = [name for name in self._parameters if is_present[name]]
        owned = self._reduce_to_owners(present)
        if not math.isfinite(total):
            return total, update.state
        if update.clip_norm is not None and present:
            owned = self._clip(owned, present, update.clip_norm)
        state = replace(update, clip_norm=None).apply(owned)
        works = [self._group.start(Broadcast(update.parameters[n].detach(), root)) for n, root in self._owners.items()]
        for work in works:
            work.wait()
        self._traffic = Traffic(self._group.clock.now() - started, 0.0, self._num_bytes)
        return total, state

    def traffic(self) -> Traffic:
        """Nothing is hidden: servers are reached after backward. The owners' updates are in the time."""
        return self._traffic

    def collect(self, state: OptimizerState) -> OptimizerState:
        """Owners send the slots that they alone keep up to date."""
        slots = {name: {slot: tensor.clone() for slot, tensor in own.items()} for name, own in state.slots.items()}
        for name, owner in self._owners.items():
            for slot in sorted(slots[name]):  # an update may have put them in another order, on the owner alone
                self._group.broadcast(slots[name][slot], owner)
        return replace(state, slots=slots)

    def _reduce_to_owners(self, names: list[str]) -> dict[str, Tensor]:
        messages = {name: self._weighted(name) for name in names}
        works = [self._group.start(Reduce(message, self._owners[name])) for name, message in messages.items()]
        for work in works:
            work.wait()
        return {name: message for name, message in messages.items() if self._owners[name] == self._group.rank}

    def _weighted(self, name: str) -> Tensor:
        gradient = self._gradients.get(name)
        return (
            torch.zeros_like(self._parameters[name]) if gradient is None else gradient.contiguous().mul_(self._weight)
        )

    def _clip(self, owned: dict[str, Tensor], names: list[str], limit: float) -> dict[str, Tensor]:
        """Owners tell each other the norms of what they own, so that all scale by the same factor."""
        norms = torch.zeros(len(names), dtype=torch.float64)
        for i, name in enumerate(names):
            if name in owned:
                norms[i] = torch.linalg.vector_norm(owned[name])
        self._group.all_reduce(norms)
        dtype = next(iter(self._parameters.values())).dtype
        factor = clip_factor(list(norms.to(dtype)), limit)
        return {name: gradient * factor for name, gradient in owned.items()}

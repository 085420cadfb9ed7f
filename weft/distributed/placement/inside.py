"""Inside of a replica that is several ranks: what some of them hold in common stays in common.

    tensor=2     rank 0   [ w, first half ]  [ norm ]        the norm's gradients are the same on both, or parts of a
                 rank 1   [ w, second half]  [ norm ]        sum that is made first (sequence parallelism)

Ranks that meet their like in every step keep such parameters equal by themselves. Where each part of the model has
servers of its own, which update when they like, the first rank that holds a parameter is the one that talks about it,
and the others get it from there.
"""

import json
from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.group import gather_parts
from weft.distributed.group.calls import Recv, Send
from weft.distributed.group.group import AbstractGroup
from weft.graph import GradientSink
from weft.specs.mesh import REPLICATED, Axis
from weft.training.placement import AbstractPlacement

__all__ = ["InsideReplica"]


@final
class InsideReplica:
    """The ranks that hold a model together, as one of them sees them.

    Args:
        group: these ranks.
        group_over: the group of ranks along axes of the mesh.
    """

    def __init__(
        self,
        group: AbstractGroup,
        placement: AbstractPlacement,
        group_over: Callable[[tuple[Axis, ...]], AbstractGroup],
    ) -> None:
        self.group = group
        self.placement = placement
        self._group_over = group_over
        self._holders: dict[str, list[int]] = {}  # of what several ranks hold alike
        self._added: dict[str, AbstractGroup] = {}
        self._held_back: dict[str, Tensor | None] = {}
        self._sink: GradientSink = self._held_back.__setitem__

    # Who holds what.

    def join(self, parameters: Mapping[str, Tensor]) -> None:
        """A collective call of the replica's ranks."""
        inside = {name: self._axes_inside(name) for name, p in parameters.items() if p.requires_grad}
        self._added = {name: self._group_over(axes) for name, axes in inside.items() if axes}
        own = {name: str(self.placement.cut_of(f"parameter/{name}")) for name in parameters}
        text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        holders: dict[tuple[str, str], list[int]] = {}
        for rank, said in enumerate(gather_parts(self.group, text)):
            for held in json.loads(bytes(said.tolist())).items():
                holders.setdefault(held, []).append(rank)
        shared = {name: ranks for (name, _), ranks in holders.items() if len(ranks) > 1 and self.group.rank in ranks}
        self._holders = {name: shared[name] for name in sorted(shared)}

    def _axes_inside(self, name: str) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.placement.reduced_over(name) if axis not in REPLICATED)

    @property
    def shared(self) -> tuple[str, ...]:
        """Parameters that this rank and others of the replica hold alike."""
        return tuple(self._holders)

    def speaks_for(self, name: str) -> bool:
        """Whether this rank is the one that talks about a parameter."""
        return self._holders.get(name, [self.group.rank])[0] == self.group.rank

    @torch.no_grad()
    def hand_round(self, tensors: Mapping[str, Tensor]) -> None:
        """Parameters that several ranks hold become those of the first of them, in place."""
        works = []
        for name, ranks in self._holders.items():
            tensor = tensors.get(name)
            if tensor is None:
                continue
            if self.speaks_for(name):
                works += [self.group.start(Send(tensor.detach().contiguous(), rank)) for rank in ranks[1:]]
            else:
                works.append(self.group.start(Recv(tensor.detach(), ranks[0])))
        for work in works:
            work.wait()

    # Gradients.

    def begin(self, sink: GradientSink) -> GradientSink:
        """A sink that passes gradients on, and holds back those that are added up inside of the replica first."""
        if not self._added:
            return sink
        self._held_back, self._sink = {}, sink
        return self._add

    def _add(self, name: str, gradient: Tensor | None) -> None:
        if name in self._added:
            self._held_back[name] = gradient
        else:
            self._sink(name, gradient)

    def finish(self, parameters: Mapping[str, Tensor]) -> None:
        """Add up what was held back, in the order of the model, and pass it on. All ranks of the replica call it."""
        for name, group in self._added.items():
            self._sink(name, _sum(self._held_back.get(name), parameters[name], group))
        self._held_back = {}

    def total(self, number: float) -> float:
        """The sum over the ranks of the replica, such as of the loss, which one of them has."""
        found = torch.tensor([number], dtype=torch.float64)
        self.group.all_reduce(found)
        return float(found)


def _sum(gradient: Tensor | None, like: Tensor, group: AbstractGroup) -> Tensor | None:
    """Over a group; None where no rank has any."""
    own = torch.zeros_like(like) if gradient is None else gradient
    message = torch.cat([own.detach().reshape(-1), own.new_tensor([float(gradient is not None)])])
    group.all_reduce(message)
    return message[:-1].view(like.shape) if message[-1] else None

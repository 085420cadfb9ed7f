"""Replicas that go their own ways for a while: each makes its own updates, a scheme brings their weights together.

A replica may be several ranks, a pipeline or a group that splits layers. Then each part of the model has a group and a
scheme of its own, and all parts take the same steps:

    data=2 pipeline=2     stage 0   rank 0 <-- scheme --> rank 1        one loss, one norm and one decision
                          stage 1   rank 2 <-- scheme --> rank 3        in each of the columns
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.agreement import Agreement
from weft.distributed.consistency.own_steps import OwnSteps
from weft.distributed.consistency.scheme import AbstractGroupScheme
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.inside import InsideReplica
from weft.errors import PlanError
from weft.graph import GradientSink, State
from weft.specs import Mesh
from weft.training.checkpoint import Entry
from weft.training.gradients import use_point
from weft.training.optimizers import OptimizerState
from weft.training.placement import AbstractPlacement
from weft.training.replicas import AbstractReplicas, Consensus, Traffic, Update
from weft.training.snapshot import cut_beside

__all__ = ["RelaxedReplicas"]


@final
class RelaxedReplicas(AbstractReplicas):
    """Synchronous replicas for the first `until` steps, and after them a scheme.

    Args:
        group: the ranks that hold the same part of the model, one of every replica.
        base: the synchronous replicas of the same group: how ranks begin, share batches, add and gather.
        consistency: the scheme as a plan spells it.
        world: all ranks, which decide together; by default those of the group.
        inside: the ranks that hold the model together, this one among them; by default this one alone.
        sends_changes: of weights, by a codec that weighs those of all parameters of a rank against each other.
    """

    def __init__(
        self,
        group: AbstractGroup,
        base: AbstractReplicas,
        scheme: AbstractGroupScheme,
        consistency: str,
        until: int = 0,
        *,
        world: AbstractGroup | None = None,
        inside: InsideReplica | None = None,
        sends_changes: bool = False,
    ) -> None:
        self._group = group
        self._world = world or group
        self._base = base
        self._scheme = scheme
        self._consistency = consistency
        self._until = until
        self._agreement = Agreement(self._world)
        self._parameters: Mapping[str, Tensor] = {}
        self._inside = inside
        self._sends_changes = sends_changes
        self._own = OwnSteps(scheme, inside)
        self._step = 0

    @property
    def mesh(self) -> Mesh:
        return self._base.mesh

    @property
    def placement(self) -> AbstractPlacement:
        return self._base.placement

    @property
    def is_synchronous(self) -> bool:
        return False

    @property
    def consistency(self) -> str:
        return self._consistency

    @property
    def group(self) -> AbstractGroup:
        return self._group

    @property
    def scheme(self) -> AbstractGroupScheme:
        return self._scheme

    def join(self, model: State) -> None:
        self._agreement.settle()
        self._agreement = Agreement(self._world)
        self._base.join(model)
        if self._inside is not None:
            self._inside.join(model.parameters)
            if self._sends_changes and self._inside.shared:
                raise PlanError(
                    "several ranks of a replica hold a parameter alike, and would each be sent other changes of it "
                    f"(parameters: {', '.join(self._inside.shared)}); use compress=bf16"
                )
        self._parameters = {name: p for name, p in model.parameters.items() if p.requires_grad}
        self._step = 0
        self._scheme.join(self._parameters)
        self._scheme.begin_together()

    def next_step(self, step: int) -> int:
        return step

    def share(self, indices: Tensor) -> Tensor:
        return self._base.share(indices)

    def begin(self, weight: float) -> GradientSink:
        if self._step < self._until:
            return self._base.begin(weight)
        return self._own.begin(self._step - self._until, weight)

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        self._step += 1
        if self._step <= self._until:
            result = self._base.finish(loss, update)
            if self._step == self._until:
                self._scheme.begin_together()
            return result
        return self._own.finish(loss, update)

    def traffic(self) -> Traffic:
        return self._scheme.traffic() if self._step > self._until else self._base.traffic()

    def agree_to_stop(self, wish: bool) -> bool:
        return self._agree("stop", wish, self._base.agree_to_stop)

    def agree_to_save(self, wish: bool) -> bool:
        return self._agree("save", wish, self._base.agree_to_save)

    def _agree(self, question: str, wish: bool, ask_all: Callable[[bool], bool]) -> bool:
        """At once where all ranks meet after this step; by a vote where they never do; else not yet."""
        step, period = self._step - self._until, self._scheme.period
        if step > 0 and period is None:
            return self._agreement.ask(question, step, wish)
        is_meeting = step <= 0 or period is None or step % period == 0
        return is_meeting and ask_all(wish)

    def dismiss(self) -> None:
        """All ranks evaluate, so all know."""

    def sum(self, tensor: Tensor) -> Tensor:
        return self._base.sum(tensor)

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return self._base.gather(tensor)

    def collect(self, state: OptimizerState) -> OptimizerState:
        """Every rank has a whole one of its own; a checkpoint holds them all."""
        return state

    @contextmanager
    def use_consensus(self, model: State) -> Iterator[Consensus]:
        self._agreement.settle()
        with self._base.use_consensus(model):
            agreed = self.agreed_weights()
            distance = 0.0 if agreed is None else self._distance(agreed)
            with use_point(model.parameters, model.parameters if agreed is None else {**model.parameters, **agreed}):
                yield Consensus(self, {"consensus_distance": distance})

    def agreed_weights(self) -> Mapping[str, Tensor] | None:
        """Those that all ranks together stand for, valid until the next step; None where all hold the same."""
        return self._scheme.consensus() if self._step > self._until else None

    def _distance(self, agreed: Mapping[str, Tensor]) -> float:
        """Root mean square over ranks of |own weights - agreed weights|."""
        moved = {name: self._parameters[name].detach().double() - tensor for name, tensor in agreed.items()}
        norm = self.placement.norm({name: torch.linalg.vector_norm(tensor) for name, tensor in moved.items()})
        squares = norm.cpu().double().square().reshape(1)
        self._group.all_reduce(squares)
        return math.sqrt(float(squares) / self.mesh.num_replicas)

    def memory(self) -> Mapping[str, Entry]:
        found = self._scheme.memory().items()
        own = {
            name: Entry.of_part(tensor, kind, cut_beside(name, self.placement.cut_of)) for name, (kind, tensor) in found
        }
        return {**self._base.memory(), **own}

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        self._step = step
        self._base.remember(step, entries)
        if step >= self._until:
            self._scheme.remember(entries)

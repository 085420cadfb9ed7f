"""The ranks that run a script: who this one is, and a group for what the script asks of all beside its training.

    gradients, weights       the groups and mailboxes of each woven plan
    mean, gather, order      the world's group, which is opened when it is first needed

They are apart because ranks may train each at a pace of its own, and still meet where the script says so.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.solo import SoloGroup
from weft.distributed.place import AbstractPlace, LaunchedPlace
from weft.distributed.placement.shares import MeasuredShares
from weft.distributed.script.observation.supervision import Supervision, find_supervision
from weft.distributed.script.world.in_step import NO_FACTS, Facts, InStep
from weft.distributed.script.world.noted_group import NotedGroup
from weft.distributed.script.world.whereabouts import Closable
from weft.errors import PlanError
from weft.specs import Mesh, Plan, parse_plan_for
from weft.specs.mesh import REPLICATED

__all__ = ["PLAN_VARIABLE", "World", "find_world", "use_world"]

PLAN_VARIABLE = "WEFT_PLAN"
"""The plan that `weft launch --plan` gives to the ranks."""


@final
class World:
    """One process of a script; of a virtual cluster, one virtual rank.

    A process that a plan has for a server alone runs the script too, up to `weave`, because model and optimizer are
    made there. It is no rank: nobody waits for it, and what it asks of all it answers by itself.

    Args:
        plan: the one that the command gave, which goes before the script's own.
        supervision: by the command.
    """

    def __init__(self, place: AbstractPlace, plan: Plan | None = None, supervision: Supervision | None = None) -> None:
        self.place = place
        self.plan = plan
        self.supervision = supervision or Supervision()
        self.num_ranks = place.size if plan is None else plan.num_ranks
        self.weavings: list[Any] = []  # of AbstractEpochs, which know the world and not the reverse
        self.dealer: MeasuredShares | None = None
        """Of shares by measured speed, where the plan that was woven wants these."""
        self.part: tuple[int, int] | None = None
        """Of the batch that was shared last: this rank's samples, and all."""
        self._due: list[Any] = []
        self._group: AbstractGroup | None = None
        self._replicas: AbstractGroup | None = None
        self.mesh = self._mesh_of(plan)
        """Who takes which share of a batch, as far as a plan is known: every rank its own, where no model is split."""
        self.in_step = InStep(place, self.num_ranks, lambda: self.group)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def speeds(self) -> Sequence[int] | None:
        """Of all replicas, by which batches are dealt; None where shares are equal."""
        return None if self.dealer is None else self.dealer.speeds

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_server(self) -> bool:
        return self.rank >= self.num_ranks

    @property
    def group(self) -> AbstractGroup:
        """All ranks, for calls of the script and no others. The first use is a collective call of all processes."""
        if self._group is None:  # not a cached_property: its lock, one for all objects, would hold up virtual ranks
            opened = self.place.open_world(self.num_ranks)
            self._group = SoloGroup() if opened is None else NotedGroup(opened, self.in_step)
        return self._group

    @property
    def replicas(self) -> AbstractGroup:
        """One rank of every replica, this one among them: those that have different samples, and between them all. The
        first use is a collective call of all ranks."""
        if self.mesh.num_replicas == self.num_ranks or self.is_server:
            return self.group
        if self._replicas is None:
            self._replicas = self.group.split(self.mesh.line(REPLICATED), self.rank)
        return self._replicas

    def follow(self, plan: Plan, mesh: Mesh | None = None) -> None:
        """Models are trained by this plan from now on.

        Args:
            mesh: of a model that PyTorch has laid out; by default the plan's.

        Raises:
            PlanError: an earlier one has dealt out samples in another way.
        """
        mesh = mesh or self._mesh_of(plan)
        if self.weavings and mesh.num_replicas != self.mesh.num_replicas:
            about = f"shares before: {self.mesh.num_replicas}, now: {mesh.num_replicas}"
            raise PlanError(f"models of one script take the same samples, and these would not ({about}); use one plan")
        self.mesh = mesh

    def _mesh_of(self, plan: Plan | None) -> Mesh:
        if self.is_server:
            return Mesh()
        is_split = plan is not None and plan.splits_model and plan.num_ranks == self.num_ranks
        return plan.mesh(self.rank) if plan is not None and is_split else Mesh(self.rank, data=self.num_ranks)

    def owe_end(self, epochs: Any) -> None:
        """An epoch was left early. Its end has to wait: nothing may be sent while an iterator is closed, because the
        exception of one rank alone closes it too."""
        if epochs not in self._due:
            self._due.append(epochs)

    def settle(self) -> None:
        """Carry out what is due. Every call that all ranks make together begins with it."""
        while self._due:
            self._due.pop(0).end_epoch()

    def meeting(self, kind: str, facts: Facts = NO_FACTS, *, same_line: bool = True) -> AbstractContextManager[None]:
        """Around every call that the script makes on all ranks over the world's group.

        Args:
            kind: the call, as users know it (`weft.mean`).
            facts: what must be the same on all ranks, by name: what differs is named with its values.
            same_line: whether it must be called at the same line of the script too.

        Raises:
            OutOfStepError: on all ranks, where one is in another call.
        """
        return self.in_step.meeting(kind, facts, same_line=same_line)

    def waiting(self, kind: str, closes: Closable | None, *, together: bool = True) -> AbstractContextManager[None]:
        """Around every wait of this rank for others in the groups and mailboxes of plans; may be entered many times.

        Args:
            closes: what is closed to end the waiting, should ranks be out of step.
            together: whether all ranks make this call, in the same order among their calls and meetings.
        """
        return self.in_step.waiting(kind, closes, together=together)


_own = threading.local()  # of a virtual rank, which is a thread
_process: list[World] = []


def find_world() -> World:
    """That of this virtual rank, or of this process."""
    found: World | None = getattr(_own, "world", None)
    if found is not None:
        return found
    if not _process:
        place, given = LaunchedPlace(silence=3600.0), os.environ.get(PLAN_VARIABLE)
        plan = parse_plan_for(given, place.size) if given else None
        _process.append(World(place, plan, find_supervision(place.rank)))
    return _process[0]


@contextmanager
def use_world(world: World) -> Iterator[None]:
    """Be a rank of this world, in this thread, while the block runs."""
    before, _own.world = getattr(_own, "world", None), world
    try:
        yield
    finally:
        _own.world = before

"""Workers and desks of a plan that gossips over the mailbox: who is where, and how they find each other.

data=2 consistency=gossip(ring,mix=pair)      process 0: worker 0, desk 0     in two threads
                                              process 1: worker 1, desk 1
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from weft.distributed.consistency.pairs import (
    GossipReplicas,
    GossipSettings,
    Slot,
    desk_address,
    keep_desk,
    make_scripts,
    read_journals,
)
from weft.distributed.mailbox import AbstractMailbox
from weft.engines.beside import run_beside
from weft.engines.place import Place
from weft.engines.post import join_post
from weft.engines.rank_program import mark_joined
from weft.errors import PlanError
from weft.specs import Plan

__all__ = ["Pairing", "use_paired"]


@dataclass(frozen=True)
class Pairing:
    """What the ranks of one process, real or of the virtual cluster, share.

    Args:
        run: the run folder, where ranks record what happens to them.
        replay: the run folder whose record they repeat; None to go by what comes.
        patience: seconds to wait for an answer.
        slots: the weights of the ranks of this process, each shared by its worker and its desk.
    """

    plan: Plan
    seeds: tuple[int, ...]
    run: Path | None = None
    replay: Path | None = None
    patience: float = 3600.0
    slots: dict[int, Slot] = field(default_factory=dict)

    @cached_property
    def settings(self) -> GossipSettings:
        size, replay = self.plan.num_ranks, self.replay
        scripts = None
        if replay is not None:
            scripts = {seed: make_scripts(read_journals(replay, seed, size)) for seed in self.seeds}
        graph, in_pairs = str(self.plan.consistency["graph"]), self.plan.is_paired
        return GossipSettings(graph, size, in_pairs, str(self.plan), self.run, scripts, self.patience)

    def slot(self, rank: int) -> Slot:
        return self.slots.setdefault(rank, Slot(rank))

    def worker(self, mailbox: AbstractMailbox, on_joined: Callable[[], None] = lambda: None) -> GossipReplicas:
        """Args:
        on_joined: called when all ranks know the worker.
        """
        return GossipReplicas(mailbox, self.slot(mailbox.address), self.settings, self.seeds, on_joined)

    def keep_desk(self, mailbox: AbstractMailbox) -> None:
        """Be the desk of this address, to the end."""
        size = self.plan.num_ranks
        keep_desk(mailbox, self.slot(mailbox.address - size), size, deals_work=self.plan.is_paired)


@contextmanager
def use_paired(pairing: Pairing, place: Place) -> Iterator[GossipReplicas]:
    """Be one of the ranks: the desk is a thread, and stays until all have ended."""
    plan = pairing.plan
    if place.size != plan.num_ranks:
        numbers = f"plan: {plan.num_ranks}, started: {place.size}"
        raise PlanError(f"plan needs another number of processes than there are ({numbers}); start as many")
    known = range(plan.num_addresses)
    desk = join_post(place, address=desk_address(plan.num_ranks, place.rank), known=known)
    desk.follow_peers()  # before its worker is there: that it leaves is what ends a desk
    worker = join_post(place, address=place.rank, known=known)
    try:
        with run_beside({f"desk {place.rank}": partial(pairing.keep_desk, desk)}):
            try:
                replicas = pairing.worker(worker, partial(mark_joined, place))
                yield replicas
                replicas.depart()
            finally:
                worker.close()  # which its desk is told, and ends
    finally:
        desk.close()

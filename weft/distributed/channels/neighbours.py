"""Ranks that reach their neighbours alone, over the mailbox: a worker, and beside it what answers for it meanwhile.

data=2 consistency=gossip(ring,mix=pair)      process 0: worker 0, responder 0     in two threads
                                              process 1: worker 1, responder 1
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from weft.distributed.channels.background import run_in_background
from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.consistency.pairs import (
    GossipReplicas,
    GossipSettings,
    SharedWeights,
    make_replay_plans,
    read_journals,
    respond,
)
from weft.distributed.place import AbstractPlace
from weft.specs import Plan
from weft.training.replicas import AbstractReplicas

__all__ = ["use_neighbours"]


@contextmanager
def use_neighbours(plan: Plan, place: AbstractPlace, spec: RunSpec) -> Iterator[AbstractReplicas | None]:
    """Be one of the processes: a worker, with its responder beside it in a thread until all have ended, or, on the
    virtual cluster, one of the two."""
    settings, kinds = settings_of(plan, place, spec), plan.roles.kinds
    workers = [address for address in place.addresses(plan) if kinds[address] == "worker"]
    responders = [address for address in place.addresses(plan) if kinds[address] == "responder"]
    answers = {f"responder {a}": _responder(a, plan, place, settings) for a in responders}
    if not workers:
        for answer in answers.values():
            answer()
        yield None
        return
    (rank,) = workers
    with run_in_background(answers):
        mailbox = place.open_mailbox(plan, rank)
        try:
            weights = place.shared(f"weights of rank {rank}", partial(SharedWeights, rank))
            replicas = GossipReplicas(mailbox, weights, settings, spec.seeds, place.mark_joined)
            yield replicas
            replicas.depart()
        finally:
            mailbox.close()  # which its responder is told, and ends


def _responder(address: int, plan: Plan, place: AbstractPlace, settings: GossipSettings) -> Callable[[], None]:
    """Answers neighbours at this address, to the end."""
    rank = address - plan.num_ranks
    weights = place.shared(f"weights of rank {rank}", partial(SharedWeights, rank))
    mailbox = place.open_mailbox(plan, address)
    mailbox.follow_peers()  # before its worker is there: that it leaves is what ends a responder

    def answer() -> None:
        try:
            respond(mailbox, weights, settings.size, deals_work=settings.in_pairs)
        finally:
            mailbox.close()

    return answer


def settings_of(plan: Plan, place: AbstractPlace, spec: RunSpec) -> GossipSettings:
    """The settings that all ranks of the plan share."""
    size, replay = plan.num_ranks, spec.replay
    plans = None
    if replay is not None:
        plans = {seed: make_replay_plans(read_journals(replay, seed, size)) for seed in spec.seeds}
    choice = plan.consistency
    return GossipSettings(
        str(choice["graph"]), size, choice["mix"] == "pair", str(plan), spec.run, plans, place.patience
    )

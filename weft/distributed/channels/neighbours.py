"""Ranks that reach their neighbours alone, over the mailbox: a worker, and beside it what answers for it meanwhile.

data=2 consistency=gossip(ring,mix=pair)      process 0: worker 0, responder 0     in two threads
                                              process 1: worker 1, responder 1
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from weft.distributed.channels.addresses import use_addresses
from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.consistency.pairs import (
    GossipReplicas,
    GossipSettings,
    SharedWeights,
    make_replay_plans,
    read_journals,
    respond,
)
from weft.distributed.mailbox import AbstractMailbox
from weft.distributed.place import AbstractPlace
from weft.specs import Plan
from weft.training.replicas import AbstractReplicas

__all__ = ["use_neighbours"]


@contextmanager
def use_neighbours(plan: Plan, place: AbstractPlace, spec: RunSpec) -> Iterator[AbstractReplicas | None]:
    """Be one of the processes: a worker, with its responder beside it in a thread until all have ended, or, on the
    virtual cluster, one of the two."""
    settings = settings_of(plan, place, spec)

    def answer(mailbox: AbstractMailbox) -> Callable[[], object]:
        mailbox.follow_peers()  # before its worker is there: that it leaves is what ends a responder
        weights = _weights_of(mailbox.address - plan.num_ranks, place)
        return partial(respond, mailbox, weights, settings.size, deals_work=settings.in_pairs)

    with use_addresses(plan, place, answer) as own:
        if own is None:
            yield None
            return
        replicas = GossipReplicas(own, _weights_of(own.address, place), settings, spec.seeds, place.mark_joined)
        yield replicas
        replicas.depart()


def _weights_of(rank: int, place: AbstractPlace) -> SharedWeights:
    """One object for the worker and its responder."""
    return place.shared(f"weights of rank {rank}", partial(SharedWeights, rank))


def settings_of(plan: Plan, place: AbstractPlace, spec: RunSpec) -> GossipSettings:
    """The settings that all ranks of the plan share."""
    size, replay = plan.num_ranks, spec.replay
    plans = None
    if replay is not None:
        plans = {seed: make_replay_plans(read_journals(replay, seed, size)) for seed in spec.seeds}
    choice = plan.consistency
    return GossipSettings(
        str(choice["graph"]), size, choice["mix"] == "pair", str(plan), spec.run, plans, place.patience, plan.compress
    )

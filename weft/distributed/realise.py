"""From a plan to what the training loop needs, on any place: the one function that knows what a plan means.

    plan     data=4 consistency=stale(3) topology=server(2)
    place    this process of those that were started, or this virtual rank

    mesh           who this rank is on each axis
    placement      which part of the model, of the optimizer's state and of a batch is its own
    channel        how it reaches the others: in a group, through servers, or its neighbours alone
    consistency    when replicas agree

What comes out are replicas (weft/training/replicas.py); the loop never asks which plan they carry out.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from weft.distributed.channels.all_reduce import use_all_reduce
from weft.distributed.channels.neighbours import use_neighbours
from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.channels.servers import use_servers
from weft.distributed.place import AbstractPlace
from weft.errors import PlanError
from weft.specs import Plan, as_plan
from weft.specs.roles import Channel
from weft.training.replicas import AbstractReplicas

__all__ = ["RunSpec", "realise"]

CHANNELS: Mapping[
    Channel, Callable[[Plan, AbstractPlace, RunSpec], AbstractContextManager[AbstractReplicas | None]]
] = {
    "all_reduce": use_all_reduce,
    "servers": use_servers,
    "neighbours": use_neighbours,
}


@contextmanager
def realise(plan: Plan | str, place: AbstractPlace, spec: RunSpec | None = None) -> Iterator[AbstractReplicas | None]:
    """Be one process of a plan, until the block ends.

    Args:
        plan: as text or as data.
        place: who this process is.
        spec: what is trained, as far as servers and records need to know it.

    Returns:
        A context manager of this rank's replicas; None in a process that is no rank, when its servers have done their
        part.

    Raises:
        PlanError: the plan makes no sense, or needs another number of processes than there are.
    """
    chosen = as_plan(plan)
    needed = place.size_for(chosen)
    if needed != place.size:
        numbers = f"plan: {needed}, started: {place.size}"
        raise PlanError(f"plan needs another number of processes than there are ({numbers}); start as many")
    with CHANNELS[chosen.channel](chosen, place, spec or RunSpec()) as replicas:
        yield replicas

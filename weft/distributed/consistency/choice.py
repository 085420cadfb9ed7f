"""From the consistency that a plan names to the replicas that keep it."""

from collections.abc import Callable, Mapping
from typing import Literal, cast

from weft.distributed.consistency.elastic import ElasticAveraging
from weft.distributed.consistency.gossip import Gossip
from weft.distributed.consistency.graphs import make_mixing
from weft.distributed.consistency.local import LocalAveraging, OuterOptimizer
from weft.distributed.consistency.relaxed import RelaxedReplicas
from weft.distributed.consistency.scheme import AbstractScheme
from weft.distributed.group.group import AbstractGroup
from weft.specs.plan import Choice
from weft.training.replicas import AbstractReplicas

__all__ = ["SCHEMES", "relax"]


def _local(group: AbstractGroup, choice: Choice) -> AbstractScheme:
    outer = None
    if choice["outer"] == "nesterov":
        outer = OuterOptimizer(lr=float(choice["outer_lr"]), momentum=float(choice["outer_momentum"]))
    return LocalAveraging(group, steps=int(choice["steps"]), averages_state=choice["state"] == "mean", outer=outer)


def _elastic(group: AbstractGroup, choice: Choice) -> AbstractScheme:
    return ElasticAveraging(group, steps=int(choice["steps"]), beta=float(choice["beta"]))


def _gossip(group: AbstractGroup, choice: Choice) -> AbstractScheme:
    mix = cast(Literal["during", "after"], choice["mix"])
    return Gossip(group, make_mixing(str(choice["graph"]), group.size), mix=mix)


SCHEMES: Mapping[str, Callable[[AbstractGroup, Choice], AbstractScheme]] = {
    "local": _local,
    "elastic": _elastic,
    "gossip": _gossip,
}


def relax(base: AbstractReplicas, group: AbstractGroup, choice: Choice) -> AbstractReplicas:
    """The replicas with this consistency; `base`, the synchronous ones, as they are for `sync`."""
    if choice.name == "sync":
        return base
    until = int(choice["after"]) if choice.name == "local" else 0
    return RelaxedReplicas(group, base, SCHEMES[choice.name](group, choice), str(choice), until)

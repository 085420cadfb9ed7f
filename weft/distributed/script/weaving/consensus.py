"""The weights that all ranks of a script stand for, where they have met and none takes a step."""

from collections.abc import Mapping

from torch import Tensor

from weft.distributed.consistency.pairs import GossipReplicas
from weft.distributed.consistency.relaxed import RelaxedReplicas
from weft.distributed.consistency.server import ServedReplicas
from weft.distributed.group.group import AbstractGroup
from weft.training.replicas import AbstractReplicas

__all__ = ["agreed_weights"]


def agreed_weights(replicas: AbstractReplicas | None, group: AbstractGroup) -> Mapping[str, Tensor] | None:
    """On every rank, by name; None where every rank holds just these. All ranks call it.

    in a group     what the scheme says: the mean, or the centre
    servers        the weights, or the centre, that they hold once all ranks have come
    neighbours     the mean, with what responders have done while their ranks computed

    Args:
        group: all ranks, beside the plan's own.
    """
    match replicas:
        case RelaxedReplicas():
            return replicas.agreed_weights()
        case ServedReplicas():
            group.barrier()  # nobody pushes any more
            return replicas.fetch_weights()
        case GossipReplicas():
            group.barrier()
            mean = {name: weight.clone() for name, weight in replicas.current_weights().items()}
            for weight in mean.values():
                group.all_reduce(weight, "mean")
            return mean
        case _:
            return None

"""From the consistency that a plan names to the replicas that keep it in a group of all ranks."""

from weft.distributed.codecs import AbstractCodec
from weft.distributed.consistency.relaxed import RelaxedReplicas
from weft.distributed.group.group import AbstractGroup
from weft.specs.loading import load
from weft.specs.plan import Choice, value_of
from weft.training.replicas import AbstractReplicas

__all__ = ["relax"]


def relax(base: AbstractReplicas, group: AbstractGroup, choice: Choice, codec: AbstractCodec) -> AbstractReplicas:
    """The replicas with this consistency; `base`, the synchronous ones, as they are where it is synchronous.

    Args:
        base: synchronous replicas of the same group.
        group: that of the replicas.
        choice: the consistency of a plan.
        codec: what is sent instead of weights, or of differences of them.
    """
    value = value_of("consistency", choice)
    if value.traits.is_synchronous:
        return base
    scheme = load(value.realised_by["all_reduce"])(group, choice, codec)
    return RelaxedReplicas(group, base, scheme, str(choice), int(choice.get("after", 0)))

"""From the consistency that a plan names to the replicas that keep it in a group of all ranks."""

from weft.distributed.codecs import AbstractCodec
from weft.distributed.consistency.relaxed import RelaxedReplicas
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.inside import InsideReplica
from weft.specs.loading import load
from weft.specs.plan import Choice, value_of
from weft.training.replicas import AbstractReplicas

__all__ = ["relax"]


def relax(
    base: AbstractReplicas,
    group: AbstractGroup,
    choice: Choice,
    codec: AbstractCodec,
    *,
    world: AbstractGroup | None = None,
    inside: InsideReplica | None = None,
) -> AbstractReplicas:
    """The replicas with this consistency; `base`, the synchronous ones, as they are where it is synchronous.

    Args:
        base: synchronous replicas of the same group.
        group: that of the replicas.
        choice: the consistency of a plan.
        codec: what is sent instead of weights, or of differences of them.
        world: all ranks; by default those of the group.
        inside: the ranks that hold the model together; by default this one alone.
    """
    value = value_of("consistency", choice)
    if value.traits.is_synchronous:
        return base
    scheme = load(value.realised_by["all_reduce"])(group, choice, codec)
    until = int(choice.get("after", 0))
    return RelaxedReplicas(
        group,
        base,
        scheme,
        str(choice),
        until,
        world=world,
        inside=inside,
        sends_changes=not codec.carries_weights,
    )

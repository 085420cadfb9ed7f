"""From the consistency that a plan names to the replicas that keep it in a group of all ranks."""

from weft.distributed.consistency.relaxed import RelaxedReplicas
from weft.distributed.group.group import AbstractGroup
from weft.specs.axes import AXES
from weft.specs.loading import load
from weft.specs.plan import Choice
from weft.training.replicas import AbstractReplicas

__all__ = ["relax"]


def relax(base: AbstractReplicas, group: AbstractGroup, choice: Choice) -> AbstractReplicas:
    """The replicas with this consistency; `base`, the synchronous ones, as they are for `sync`."""
    if choice.name == "sync":
        return base
    scheme = load(AXES["consistency"][choice.name].realised_by["all_reduce"])(group, choice)
    return RelaxedReplicas(group, base, scheme, str(choice), int(choice.get("after", 0)))

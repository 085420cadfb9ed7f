"""The weights that all ranks of a script stand for, where they have met and none takes a step."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor

from weft.distributed.consistency.pairs import GossipReplicas
from weft.distributed.consistency.relaxed import RelaxedReplicas
from weft.distributed.consistency.server import ServedReplicas
from weft.distributed.group.group import AbstractGroup
from weft.distributed.script.world import find_world
from weft.training.replicas import AbstractReplicas

__all__ = ["agreed_weights", "consensus"]


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


@contextmanager
def consensus() -> Iterator[None]:
    """Hold, in every woven model, the parameters that all ranks together stand for.

    Where ranks are synchronous, and in one process, that is what they hold anyway. Between epochs of a woven loader it
    is so without asking; this is for loops of another kind, and for a look in the middle of an epoch. Every rank calls
    it; the block itself may differ from rank to rank.

    Example:

        with weft.consensus():
            torch.save(model.state_dict(), "model.pt")
    """
    with ExitStack() as held:
        for weaving in find_world().weavings:
            held.enter_context(weaving.use_consensus())
        yield

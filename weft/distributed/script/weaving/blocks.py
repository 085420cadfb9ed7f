"""Blocks of a script in which its ranks exchange nothing, or hold what all of them stand for."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from weft.distributed.script.weaving.weaving import weavings_of
from weft.distributed.script.world.world import find_world

__all__ = ["consensus", "no_sync"]


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
    world = find_world()
    world.settle()
    with ExitStack() as held:
        with world.meeting("weft.consensus"):
            for weaving in weavings_of(world):
                held.enter_context(weaving.use_consensus())
        yield


@contextmanager
def no_sync() -> Iterator[None]:
    """Backward without an exchange: gradients of several batches are added up on each rank, and go out with the next
    backward outside of the block. It saves messages, not more; the result is the same.

    Example:

        with weft.no_sync():
            loss_of(first).backward()
        loss_of(second).backward()
        optimizer.step()
    """
    with ExitStack() as held:
        for weaving in weavings_of(find_world()):
            if weaving.backward is not None:
                held.enter_context(weaving.backward.no_sync())
        yield

"""Ranks of a pipeline as real processes: what each of them runs."""

from weft.distributed.group import FaultyGroup, Kill, kill_this_process
from weft.distributed.place import Kind, find_launch, open_group
from weft.errors import PeerLostError

__all__ = ["train_or_lose"]


def train_or_lose(kind: Kind, plan: str, rank: int, at_call: int) -> str:
    """Steps of a small pipeline, one of whose ranks is killed at a call; what the others say of it."""
    from tests.distributed.placement.pipeline.test_pipeline_executor import batch_of, build_executor

    own = open_group(find_launch(), kind, timeout=15)
    group = FaultyGroup(own, [Kill(rank, at_call)], die=kill_this_process)
    try:
        executor = build_executor(group, plan)
        state = executor.initial_state()
        for _ in range(20):
            _, state = executor(state, batch_of(8), lambda name, gradient: None)
    except PeerLostError as error:
        return f"lost {error.peer}"
    finally:
        own.close()
    return "done"

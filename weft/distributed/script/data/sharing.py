"""Batches that a script makes by hand, shared between ranks.

rank 0   cuts its batch     | share 0 | share 1 | share 2 |
rank r   gets its replica's; what it drew itself does not count, so that generators of ranks need not be in step
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from weft.distributed.group.calls import Recv, Send
from weft.distributed.group.group import AbstractGroup
from weft.distributed.script.calls.carrying import broadcast_bytes, home_of
from weft.distributed.script.calls.trees import (
    Outline,
    as_json,
    joined_bytes,
    num_bytes,
    outline_of,
    split_bytes,
    tensors_of,
    value_of,
)
from weft.distributed.script.data.cutting import cut, num_samples, part_of
from weft.distributed.script.data.shares import hand_out
from weft.distributed.script.observation.events import BatchTaken
from weft.distributed.script.world.world import World, find_world
from weft.specs import Mesh

__all__ = ["share"]


def share(*batch: Any, dim: int = 0) -> Any:
    """This rank's part of a batch that was made by hand. A collective call; in one process the batch comes back.

    Rank 0's batch counts, whatever the others give. Gradients are weighed by the samples of each share, which may be
    uneven; a rank for which none is left gets the first sample, and it does not count. The weight is that of the batch
    that was shared last: share what is not trained on under `torch.no_grad()`, where it is left as it is.

    What is made for a whole batch must be shared with it, or be made from the share, such as the hidden state of a
    recurrent network: `hidden = model.init_hidden(x.size(1))`.

    Args:
        batch: tensors, or dicts, lists and tuples of them, of any device; those of other ranks may be left out.
        dim: that of samples, in all tensors.

    Returns:
        The same, cut; where one value was given, that one alone.

    Raises:
        UsageError: if tensors differ in how many samples they have, or something cannot be cut.

    Example: `x, y = weft.share(*get_batch("train"))`, or once for data of shape (time, batch):
    `data = weft.share(batchify(tokens), dim=1)`
    """
    world = find_world()
    world.settle()
    given = batch[0] if len(batch) == 1 else batch
    if world.num_ranks == 1:
        own, part = given, (num_samples(given, dim),) * 2
    else:
        with world.meeting("weft.share", {"dim": dim}, same_line=False):  # rank 0 may have a line of its own
            own, part = _share(world.group, world.mesh, world.speeds, given, dim)
    _hand_out(world, own, part)
    return own


def _hand_out(world: World, batch: Any, part: tuple[int, int]) -> None:
    if not torch.is_grad_enabled():
        return
    world.part = part
    for weaving in world.weavings:
        hand_out(world, weaving.share, batch, *part)
    if world.supervision.observers:
        world.supervision.tell(BatchTaken(batch))


def _share(
    group: AbstractGroup, mesh: Mesh, speeds: Sequence[int] | None, batch: Any, dim: int
) -> tuple[Any, tuple[int, int]]:
    """This rank's part, how many samples it has, and how many all have."""
    if group.rank == 0:
        num_samples(batch, dim)  # refuses before anything is sent
        outline, _ = outline_of(batch)
        broadcast_bytes(group, as_json(outline))
        return _cut_and_send(group, mesh, speeds, batch, dim)
    outline = json.loads(broadcast_bytes(group, b""))
    shape = value_of(outline, [torch.empty(1, dtype=dtype).expand(shape) for dtype, shape in tensors_of(outline)])
    whole = num_samples(shape, dim)
    own, count = part_of(whole, mesh.replica, mesh.num_replicas, speeds)
    part, _ = outline_of(cut(shape, own, dim))
    return _receive(group, part, home_of(batch)), (count, whole)


def _cut_and_send(
    group: AbstractGroup, mesh: Mesh, speeds: Sequence[int] | None, batch: Any, dim: int
) -> tuple[Any, tuple[int, int]]:
    whole, works = num_samples(batch, dim), []
    for rank in range(1, group.size):
        own, _ = part_of(whole, mesh.seen_by(rank).replica, mesh.num_replicas, speeds)
        payload = joined_bytes(outline_of(cut(batch, own, dim))[1])
        if len(payload):
            works.append(group.start(Send(payload, rank)))
    for work in works:
        work.wait()
    own, count = part_of(whole, mesh.replica, mesh.num_replicas, speeds)
    outline, tensors = outline_of(cut(batch, own, dim))
    return value_of(outline, [tensor.contiguous() for tensor in tensors]), (
        count,
        whole,
    )  # as those who receive have it


def _receive(group: AbstractGroup, outline: Outline, home: torch.device) -> Any:
    payload = torch.empty(num_bytes(outline), dtype=torch.uint8)
    if len(payload):
        group.run(Recv(payload, 0))
    return value_of(outline, [tensor.to(home) for tensor in split_bytes(payload, outline)])

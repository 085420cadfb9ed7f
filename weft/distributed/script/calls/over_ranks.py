"""Calls of a loop that concern all ranks: mean, sum, gather, broadcast, barrier, and one printer.

All but `print` are collective: every rank calls them, in the same order. They work in one process too.
"""

import builtins
import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.distributed.script.calls.carrying import broadcast_value, gather_values
from weft.distributed.script.calls.reductions import Kind, combine
from weft.distributed.script.world.world import find_world
from weft.errors import UsageError

__all__ = ["barrier", "broadcast", "gather", "mean", "print", "sum"]


def mean(value: Any, weight: Any = None) -> Any:
    """The mean over ranks. The same bits come back on every rank, in the type that went in.

    Args:
        value: a number, a tensor of any device, or a dict, list or tuple of them; of the same form on all ranks. A rank
            that has nothing to say gives None, or anything with `weight=0`.
        weight: how much this rank's value counts, such as the samples that it saw; all ranks count alike without one.

    Returns:
        Numbers as float, tensors as they were (integers and bools as floating-point numbers), without history.

    Raises:
        UsageError: for anything else, values of different forms, and weights that are negative or all zero.

    Example: `accuracy = weft.mean(num_right / num_seen, weight=num_seen)`
    """
    return _over_ranks("mean", value, 1.0 if weight is None else _check_weight(weight))


def sum(value: Any) -> Any:
    """The sum over ranks, in rank order; otherwise as `mean`. Integers stay integers (tensors: int64), bools count."""
    return _over_ranks("sum", value, 1.0)


def gather(value: Any) -> Any:
    """The values of all ranks, in rank order.

    Args:
        value: a tensor or an array, which is joined with the others' along dim 0, where lengths may differ (one without
            a dim becomes an element); a list, joined likewise; a number or text, of which a list comes back; or a dict
            or tuple of these, joined member by member.

    Raises:
        UsageError: for anything else, and for tensors that do not fit together.
    """
    world = find_world()
    world.settle()
    with world.meeting("weft.gather"):
        return _join(gather_values(world.replicas, value))


def broadcast(value: Any, root: int = 0) -> Any:
    """One rank's value, on all: numbers, texts, tensors, and dicts, lists or tuples of them.

    Args:
        value: that of rank `root` counts; the others may give anything. Tensors come to the device of the first tensor
            that a rank gives itself, else to the host.
    """
    world = find_world()
    if not 0 <= root < world.num_ranks:
        raise UsageError(f"no such rank (root: {root}, ranks: {world.num_ranks}); ranks count from 0")
    world.settle()
    with world.meeting("weft.broadcast", {"root": root}, same_line=False):  # the root may have a line of its own
        return broadcast_value(world.group, value, root if world.group.size > 1 else 0)


def barrier() -> None:
    """Return when every rank has called it."""
    world = find_world()
    world.settle()
    with world.meeting("weft.barrier", same_line=False):
        world.group.barrier()


def print(*values: Any, **options: Any) -> None:
    """Python's own, on rank 0 alone."""
    if find_world().is_first:
        builtins.print(*values, **options)


def _over_ranks(kind: Kind, value: Any, weight: float) -> Any:
    world = find_world()
    world.settle()
    with world.meeting(f"weft.{kind}"):
        return combine(world.replicas, kind, value, weight)


def _check_weight(weight: Any) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"weight is not a number from 0 up (weight: {weight!r}); give the samples that a rank has seen"
        )
    return number


def _join(values: list[Any]) -> Any:
    """The values of all ranks as one."""
    first = values[0]
    match first:
        case Tensor():
            return torch.cat(_check_fit([value.unsqueeze(0) if value.dim() == 0 else value for value in values]))
        case np.ndarray():
            return np.concatenate(_check_fit([np.atleast_1d(value) for value in values]))
        case list():
            return [item for value in values for item in value]
        case dict():
            return {key: _join([value[key] for value in values]) for key in first}
        case tuple():
            return tuple(_join(list(items)) for items in zip(*values, strict=True))
        case _:
            return values


Joined = TypeVar("Joined", Tensor, "np.ndarray[Any, Any]")


def _check_fit(parts: list[Joined]) -> list[Joined]:
    """Parts that can be joined; one without elements fits to any."""
    shapes = {rank: tuple(part.shape) for rank, part in enumerate(parts)}
    rests = {(shape[1:], str(parts[rank].dtype)) for rank, shape in shapes.items() if math.prod(shape)}
    if len(rests) > 1:
        told = ", ".join(f"rank {rank}: {shape} {parts[rank].dtype}" for rank, shape in shapes.items())
        raise UsageError(f"tensors of ranks do not fit together ({told}); they may differ in dim 0 alone")
    return [part for part in parts if math.prod(part.shape)] or parts[:1]

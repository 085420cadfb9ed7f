"""The one executor of schedules: buffers in, rounds of Send and Recv out, and what arrives is reduced."""

from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.distributed.collectives.schedule import Action, Schedule
from weft.distributed.group.calls import Recv, ReduceOp, Send

__all__ = ["Exchange", "Round", "combine", "finish_mean", "perform"]


class Round(NamedTuple):
    """Calls to start together, once `bytes_reduced` bytes of the round before have been reduced."""

    calls: list[Send | Recv]
    bytes_reduced: int


Exchange = Generator[Round, None, int]
"""A collective under way: yields a round, is resumed when all its calls are done, returns the bytes reduced last.

Whoever drives it decides when that is, so the same code runs blocking, polled, and in virtual time.
"""


def perform(
    schedule: Schedule,
    source: Tensor,
    source_bounds: Sequence[int],
    *,
    tag: int,
    target: Tensor | None = None,
    target_bounds: Sequence[int] | None = None,
    op: ReduceOp = "sum",
    bytes_reduced: int = 0,
) -> Exchange:
    """Send parts of the flat `source`, receive parts of the flat `target` (the same buffer where it is not given).

    Parts without elements are not sent; both sides see that from the bounds. `bytes_reduced` were reduced before.
    """
    into = source if target is None else target
    into_bounds = source_bounds if target_bounds is None else target_bounds
    for moves in schedule:
        calls: list[Send | Recv] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        for move in moves:
            sends = move.action is Action.SEND
            bounds = source_bounds if sends else into_bounds
            begin, end = bounds[move.parts[0]], bounds[move.parts[1]]
            if begin == end:
                continue
            view = (source if sends else into)[begin:end]
            if sends:
                calls.append(Send(view, move.peer, tag))
            elif move.action is Action.RECV:
                calls.append(Recv(view, move.peer, tag))
            else:
                arrival = torch.empty_like(view)
                arrivals.append((view, arrival))
                calls.append(Recv(arrival, move.peer, tag))
        if calls:
            yield Round(calls, bytes_reduced)
            bytes_reduced = 0
        for view, arrival in arrivals:
            combine(view, arrival, op)
            bytes_reduced += view.numel() * view.element_size()
    return bytes_reduced


def combine(into: Tensor, other: Tensor, op: ReduceOp) -> None:
    """In place, element by element; `mean` adds, and is divided once at the end."""
    if op in ("sum", "mean"):
        into.add_(other)
    elif op == "product":
        into.mul_(other)
    elif op == "min":
        torch.minimum(into, other, out=into)
    else:
        torch.maximum(into, other, out=into)


def finish_mean(tensor: Tensor, op: ReduceOp, size: int) -> None:
    if op == "mean":
        tensor.div_(size)

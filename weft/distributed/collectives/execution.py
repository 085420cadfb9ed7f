"""The one executor of schedules: buffers in, rounds of Send and Recv out, and what arrives is reduced."""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.distributed.collectives.moves import Action, Parts, Schedule
from weft.distributed.group.calls import Recv, ReduceOp, Send

__all__ = ["CollectiveRounds", "Round", "combine", "finish_mean", "perform"]


class Round(NamedTuple):
    """Calls to start together, once `bytes_reduced` bytes of the round before have been reduced."""

    calls: list[Send | Recv]
    bytes_reduced: int


CollectiveRounds = Generator[Round, None, int]
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
) -> CollectiveRounds:
    """Send parts of the flat `source`, receive parts of the flat `target` (the same buffer where it is not given).

    Parts without elements are not sent; both sides see that from the bounds. `bytes_reduced` were reduced before.

    Args:
        schedule: of this rank.
        source_bounds: where the parts of `source` begin and end, in elements.
        tag: of all its messages.
        target_bounds: of `target`; those of `source` where it is not given.
        op: by which parts that arrive are reduced.
        bytes_reduced: how many were reduced before.
    """
    view_of_source = _views(source, source_bounds)
    view_of_target = view_of_source if target is None else _views(target, target_bounds or source_bounds)
    send, recv = Action.SEND, Action.RECV  # looked up once: this loop is what a virtual cluster spends its time on
    for moves in schedule:
        calls: list[Send | Recv] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        for move in moves:
            is_send = move.action is send
            view = (view_of_source if is_send else view_of_target)(move.parts)
            if view is None:
                continue
            if is_send:
                calls.append(Send(view, move.peer, tag))
            elif move.action is recv:
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
            bytes_reduced += view.nbytes
    return bytes_reduced


def _views(buffer: Tensor, bounds: Sequence[int]) -> Callable[[Parts], Tensor | None]:
    """Parts to their view of the buffer, None where they have no elements. Schedules come back to the same parts."""
    known: dict[Parts, Tensor | None] = {}

    def view_of(parts: Parts) -> Tensor | None:
        if parts not in known:
            begin, end = bounds[parts[0]], bounds[parts[1]]
            known[parts] = buffer[begin:end] if end > begin else None
        return known[parts]

    return view_of


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

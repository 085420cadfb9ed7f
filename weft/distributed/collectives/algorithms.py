"""Every collective call as rounds of messages: buffers around the schedules."""

from collections.abc import Sequence
from functools import singledispatch
from itertools import accumulate

import torch
from torch import Tensor

from weft.distributed.collectives import schedules
from weft.distributed.collectives.execution import CollectiveRounds, combine, finish_mean, perform
from weft.distributed.collectives.forecast import AllReduceSchedule
from weft.distributed.collectives.moves import part_bounds
from weft.distributed.group import calls
from weft.distributed.group.calls import ReduceOp, Sizes
from weft.distributed.group.dense import HALVES, copy_back, make_dense, part_lengths
from weft.planning.collective_cost import Algorithm

__all__ = ["all_reduce_rounds", "all_reduce_schedule", "rounds_of"]


def all_reduce_rounds(
    call: calls.AllReduce,
    rank: int,
    size: int,
    tag: int,
    algorithm: Algorithm,
) -> CollectiveRounds:
    """All-reduce by this algorithm; the summation order is the algorithm's."""
    flat_tensor = make_dense(call.tensor)
    if algorithm.name == "direct":
        bytes_reduced = yield from _direct(flat_tensor, rank, size, tag, call.op)
    else:
        planned = all_reduce_schedule(algorithm, rank, size)
        bounds = part_bounds(flat_tensor.numel(), planned.num_parts)
        bytes_reduced = yield from perform(planned.schedule, flat_tensor, bounds, tag=tag, op=call.op)
        finish_mean(flat_tensor, call.op, size)
    copy_back(call.tensor, flat_tensor)
    return bytes_reduced


def all_reduce_schedule(algorithm: Algorithm, rank: int, size: int) -> AllReduceSchedule:
    """The schedule of one rank; a direct one collects every part at its own rank, which reduces it."""
    if algorithm.name == "direct":
        collecting = schedules.collect(rank, size)
        return AllReduceSchedule(collecting + schedules.all_gather(rank, size), size, collected=len(collecting))
    if algorithm.name == "ring":
        return AllReduceSchedule(schedules.ring(rank, size), size)
    if algorithm.name == "tree":
        return AllReduceSchedule(schedules.tree(rank, size), 1)
    if algorithm.name == "halving_doubling":
        return AllReduceSchedule(schedules.halving_doubling(rank, size), 1 << (size.bit_length() - 1))
    inner = algorithm.inner or size
    schedule = schedules.hierarchical(rank, size, inner, algorithm.by)
    return AllReduceSchedule(schedule, schedules.hierarchical_parts(size, inner))


def _direct(tensor: Tensor, rank: int, size: int, tag: int, op: ReduceOp) -> CollectiveRounds:
    """Part j of all ranks goes straight to rank j, is reduced there in the order of ranks, and is gathered by all.

    As many bytes as the ring, with the summation order ((x0 + x1) + x2) + ... of the groups that reduce by themselves.
    """
    bounds = part_bounds(tensor.numel(), size)
    own = tensor[bounds[rank] : bounds[rank + 1]]
    bytes_reduced = yield from _reduce_in_rank_order(own, tensor, bounds, rank, size, tag, op)
    gathering = perform(schedules.all_gather(rank, size), tensor, bounds, tag=tag, bytes_reduced=bytes_reduced)
    return (yield from gathering)


def _reduce_in_rank_order(
    output: Tensor, tensor: Tensor, bounds: Sequence[int], rank: int, size: int, tag: int, op: ReduceOp
) -> CollectiveRounds:
    """`output` (may be a view of the flat `tensor`) becomes the reduction of everyone's part `rank`."""
    length = bounds[rank + 1] - bounds[rank]
    arrived = torch.empty(size * length, dtype=tensor.dtype, device=tensor.device)
    rows = arrived.view(size, length)
    rows[rank].copy_(tensor[bounds[rank] : bounds[rank + 1]])
    arrived_bounds = [row * length for row in range(size + 1)]
    yield from perform(
        schedules.all_to_all(rank, size), tensor, bounds, tag=tag, target=arrived, target_bounds=arrived_bounds
    )
    total = rows[0].float() if rows.dtype in HALVES else rows[0]  # and rounded once, as native groups do
    for row in rows[1:]:
        combine(total, row, op)
    finish_mean(total, op, size)
    output.copy_(total)
    return (size - 1) * length * tensor.element_size()


def _bounds(whole: Tensor, sizes: Sizes | None, size: int) -> tuple[int, ...]:
    """Where the parts of the flat tensor begin and end."""
    if sizes is None:
        return part_bounds(whole.numel(), size)
    return tuple(accumulate(part_lengths(whole, sizes), initial=0))


@singledispatch
def rounds_of(call: object, rank: int, size: int, tag: int) -> CollectiveRounds:
    """The rounds that carry out `call`; all-reduce has its own function, because it has algorithms."""
    raise TypeError(f"not a collective call: {type(call).__name__}")


@rounds_of.register
def _(call: calls.ReduceScatter, rank: int, size: int, tag: int) -> CollectiveRounds:
    source = make_dense(call.tensor)
    output = make_dense(call.output)
    bounds = _bounds(call.tensor, call.sizes, size)
    bytes_reduced = yield from _reduce_in_rank_order(output, source, bounds, rank, size, tag, call.op)
    copy_back(call.output, output)
    return bytes_reduced


@rounds_of.register
def _(call: calls.AllGather, rank: int, size: int, tag: int) -> CollectiveRounds:
    output = make_dense(call.output)
    bounds = _bounds(call.output, call.sizes, size)
    output[bounds[rank] : bounds[rank + 1]].copy_(make_dense(call.tensor))
    yield from perform(schedules.all_gather(rank, size), output, bounds, tag=tag)
    copy_back(call.output, output)
    return 0


@rounds_of.register
def _(call: calls.AllToAll, rank: int, size: int, tag: int) -> CollectiveRounds:
    source, output = make_dense(call.tensor), make_dense(call.output)
    sent, received = _bounds(call.tensor, call.send_sizes, size), _bounds(call.output, call.recv_sizes, size)
    output[received[rank] : received[rank + 1]].copy_(source[sent[rank] : sent[rank + 1]])
    yield from perform(schedules.all_to_all(rank, size), source, sent, tag=tag, target=output, target_bounds=received)
    copy_back(call.output, output)
    return 0


@rounds_of.register
def _(call: calls.Broadcast, rank: int, size: int, tag: int) -> CollectiveRounds:
    tensor = make_dense(call.tensor)
    yield from perform(schedules.broadcast(rank, size, call.root), tensor, [0, tensor.numel()], tag=tag)
    copy_back(call.tensor, tensor)
    return 0


@rounds_of.register
def _(call: calls.Reduce, rank: int, size: int, tag: int) -> CollectiveRounds:
    # The tensors of the other ranks are left as they are, and inner places of the tree reduce too.
    partial = call.tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    schedule = schedules.reduce(rank, size, call.root)
    bytes_reduced = yield from perform(schedule, partial, [0, partial.numel()], tag=tag, op=call.op)
    if rank == call.root:
        finish_mean(partial, call.op, size)
        call.tensor.detach().copy_(partial.view(call.tensor.shape))
    return bytes_reduced


@rounds_of.register
def _(call: calls.NeighbourAllReduce, rank: int, size: int, tag: int) -> CollectiveRounds:
    """Order of the sum: the own tensor, then the neighbours as the graph lists them."""
    own, num_neighbours = make_dense(call.tensor), len(call.graph[rank])
    length = own.numel()
    arrived = torch.empty(num_neighbours * length, dtype=own.dtype, device=own.device)
    bounds = [row * length for row in range(num_neighbours + 1)]
    schedule = schedules.neighbours(rank, call.graph)
    yield from perform(schedule, own, [0, length], tag=tag, target=arrived, target_bounds=bounds)
    total = own * call.weights[rank][0]
    for row, weight in zip(arrived.view(num_neighbours, length), call.weights[rank][1:], strict=True):
        total.add_(row, alpha=weight)
    call.tensor.detach().copy_(total.view(call.tensor.shape))
    return num_neighbours * length * own.element_size()


@rounds_of.register
def _(call: calls.Barrier, rank: int, size: int, tag: int) -> CollectiveRounds:
    tokens = torch.zeros(2, dtype=torch.uint8)
    yield from perform(schedules.barrier(rank, size), tokens, [0, 1, 2], tag=tag)
    return 0

"""Calls in the terms of MPI: requests of mpi4py over dense buffers, bytes wherever nothing is added up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, Graph
from weft.distributed.group.dense import as_bytes, combine_neighbours, copy_back, make_dense
from weft.errors import UsageError

__all__ = ["MpiSeat", "Posted", "post"]

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}
_HALVES = (torch.float16, torch.bfloat16)


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Posted:
    """Requests under way, and what is left to do when all are done. The buffers live as long as the requests."""

    requests: list[Any]
    finish: Callable[[], None] = _nothing
    buffers: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class MpiSeat:
    """A rank at its communicators: one for each sort of traffic, so that tags and orders never meet."""

    mpi: Any
    rank: int
    size: int
    collectives: Any
    messages: Any
    neighbours: Any

    def free(self) -> None:
        for communicator in (self.collectives, self.messages, self.neighbours):
            communicator.Free()

    def bytes_of(self, dense: Tensor) -> list[Any]:
        return [as_bytes(dense).numpy(), self.mpi.BYTE]

    def numbers_of(self, dense: Tensor) -> list[Any]:
        return [dense.numpy(), getattr(self.mpi, _TYPES[dense.dtype])]


def post(seat: MpiSeat, call: Call) -> Posted:
    """Start a call that `check_call` has passed."""
    comm = seat.collectives
    match call:
        case calls.Barrier():
            return Posted([comm.Ibarrier()])
        case calls.Send():
            buffer = seat.bytes_of(make_dense(call.tensor))
            return Posted([seat.messages.Isend(buffer, call.peer, call.tag)], buffers=(buffer,))
        case calls.Recv():
            dense = make_dense(call.tensor)
            request = seat.messages.Irecv(seat.bytes_of(dense), call.peer, call.tag)
            return Posted([request], lambda: copy_back(call.tensor, dense))
        case calls.AllReduce() | calls.Reduce() | calls.ReduceScatter():
            return _post_reduction(seat, call)
        case calls.AllGather() | calls.AllToAll():
            dense, output = make_dense(call.tensor), make_dense(call.output)
            start = comm.Iallgather if isinstance(call, calls.AllGather) else comm.Ialltoall
            request = start(seat.bytes_of(dense), seat.bytes_of(output))
            return Posted([request], lambda: copy_back(call.output, output), (dense,))
        case calls.Broadcast():
            dense = make_dense(call.tensor)
            return Posted([comm.Ibcast(seat.bytes_of(dense), call.root)], lambda: copy_back(call.tensor, dense))
        case calls.Gather():
            return _post_gather(seat, call)
        case calls.Scatter():
            output = make_dense(call.output)
            whole = make_dense(call.tensor) if call.tensor is not None and seat.rank == call.root else None
            given = None if whole is None else seat.bytes_of(whole)
            request = comm.Iscatter(given, seat.bytes_of(output), call.root)
            return Posted([request], lambda: copy_back(call.output, output), (given,))
        case calls.NeighbourAllGather():
            output = make_dense(call.output)
            requests, sent = _exchange_with_neighbours(seat, call.tensor, output, call.graph)
            return Posted(requests, lambda: copy_back(call.output, output), (sent,))
        case calls.NeighbourAllReduce():
            return _post_neighbour_all_reduce(seat, call)


def _post_reduction(seat: MpiSeat, call: calls.AllReduce | calls.Reduce | calls.ReduceScatter) -> Posted:
    comm, op = seat.collectives, getattr(seat.mpi, _OPS[call.op])
    # 16-bit floats travel as 32-bit ones. A copy anyway, but for all-reduce: MPI must not write to the inputs.
    own = make_dense(call.tensor)
    own = own.float() if own.dtype in _HALVES else own
    if own.dtype not in _TYPES:
        raise UsageError(f"MPI cannot reduce this type (type: {own.dtype}); convert the tensor")
    target = call.output if isinstance(call, calls.ReduceScatter) else call.tensor
    total, is_target = own, True
    match call:
        case calls.AllReduce():
            request = comm.Iallreduce(seat.mpi.IN_PLACE, seat.numbers_of(total), op)
        case calls.Reduce():
            total, is_target = torch.empty_like(own), seat.rank == call.root
            request = comm.Ireduce(
                seat.numbers_of(own), seat.numbers_of(total) if is_target else None, op, root=call.root
            )
        case calls.ReduceScatter():
            total = own.new_empty(call.output.numel())
            request = comm.Ireduce_scatter_block(seat.numbers_of(own), seat.numbers_of(total), op)

    def finish() -> None:
        if is_target:
            if call.op == "mean":
                total.div_(seat.size)
            copy_back(target, total)

    return Posted([request], finish, (own,))


def _post_gather(seat: MpiSeat, call: calls.Gather) -> Posted:
    buffer = seat.bytes_of(make_dense(call.tensor))
    if seat.rank != call.root or call.output is None:
        return Posted([seat.collectives.Igather(buffer, None, call.root)], buffers=(buffer,))
    target, output = call.output, make_dense(call.output)
    request = seat.collectives.Igather(buffer, seat.bytes_of(output), call.root)
    return Posted([request], lambda: copy_back(target, output), (buffer,))


def _post_neighbour_all_reduce(seat: MpiSeat, call: calls.NeighbourAllReduce) -> Posted:
    weights, own = call.weights[seat.rank], make_dense(call.tensor)
    others = own.new_empty((len(weights) - 1, own.numel()))
    requests, sent = _exchange_with_neighbours(seat, own, others.view(-1), call.graph)

    def finish() -> None:
        combine_neighbours(own, others, weights)
        copy_back(call.tensor, own)

    return Posted(requests, finish, (sent,))


def _exchange_with_neighbours(
    seat: MpiSeat, tensor: Tensor, received: Tensor, graph: Graph
) -> tuple[list[Any], list[Any]]:
    """The requests, and the buffer that is sent."""
    sources, comm = graph[seat.rank], seat.neighbours
    parts = received.chunk(len(sources)) if received.numel() else [received] * len(sources)
    receives = [comm.Irecv(seat.bytes_of(part), source) for part, source in zip(parts, sources, strict=True)]
    buffer = seat.bytes_of(make_dense(tensor))
    return receives + [comm.Isend(buffer, peer) for peer, row in enumerate(graph) if seat.rank in row], buffer

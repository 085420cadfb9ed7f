"""Calls in the terms of MPI: requests of mpi4py over dense buffers, bytes wherever nothing is added up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, Sizes
from weft.distributed.group.dense import (
    HALVES,
    as_bytes,
    combine_neighbours,
    copy_back,
    make_dense,
    part_bytes,
    part_lengths,
)
from weft.errors import UsageError

__all__ = ["MpiEndpoint", "StartedCall", "start_call"]

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


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class StartedCall:
    """Requests under way, and what is left to do when all are done. The buffers live as long as the requests."""

    requests: list[Any]
    finish: Callable[[], None] = _nothing
    buffers: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class MpiEndpoint:
    """A rank and its communicators: one for each sort of traffic, so that tags and orders never meet."""

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


def start_call(endpoint: MpiEndpoint, call: Call) -> StartedCall:
    """Start a call that `check_call` has passed."""
    comm = endpoint.collectives
    match call:
        case calls.Barrier():
            return StartedCall([comm.Ibarrier()])
        case calls.Send():
            buffer = endpoint.bytes_of(make_dense(call.tensor))
            return StartedCall([endpoint.messages.Isend(buffer, call.peer, call.tag)], buffers=(buffer,))
        case calls.Recv():
            dense = make_dense(call.tensor)
            request = endpoint.messages.Irecv(endpoint.bytes_of(dense), call.peer, call.tag)
            return StartedCall([request], lambda: copy_back(call.tensor, dense))
        case calls.AllReduce() | calls.Reduce() | calls.ReduceScatter():
            return _start_reduction(endpoint, call)
        case calls.AllGather() | calls.AllToAll():
            return _start_exchange(endpoint, call)
        case calls.Broadcast():
            dense = make_dense(call.tensor)
            return StartedCall(
                [comm.Ibcast(endpoint.bytes_of(dense), call.root)], lambda: copy_back(call.tensor, dense)
            )
        case calls.NeighbourAllReduce():
            return _start_neighbour_all_reduce(endpoint, call)


def _start_exchange(endpoint: MpiEndpoint, call: calls.AllGather | calls.AllToAll) -> StartedCall:
    comm, dense, output = endpoint.collectives, make_dense(call.tensor), make_dense(call.output)
    source, target = endpoint.bytes_of(dense), endpoint.bytes_of(output)
    if isinstance(call, calls.AllGather) and _is_inside(dense, output):
        source = endpoint.mpi.IN_PLACE  # MPI forbids buffers that overlap
    match call:
        case calls.AllGather(sizes=None):
            request = comm.Iallgather(source, target)
        case calls.AllGather():
            request = comm.Iallgatherv(source, _with_counts(target, call.output, call.sizes))
        case calls.AllToAll(send_sizes=None):
            request = comm.Ialltoall(source, target)
        case calls.AllToAll():
            sent, received = (source, call.tensor, call.send_sizes), (target, call.output, call.recv_sizes)
            request = comm.Ialltoallv(_with_counts(*sent), _with_counts(*received))
    return StartedCall([request], lambda: copy_back(call.output, output), (dense,))


def _is_inside(part: Tensor, whole: Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes


def _with_counts(buffer: list[Any], whole: Tensor, sizes: Sizes | None) -> list[Any]:
    """A buffer of bytes, cut into parts that lie one after the other."""
    assert sizes is not None
    return [buffer[0], list(part_bytes(whole, sizes)), buffer[1]]  # a tuple would be counts and displacements


def _start_reduction(endpoint: MpiEndpoint, call: calls.AllReduce | calls.Reduce | calls.ReduceScatter) -> StartedCall:
    comm, op = endpoint.collectives, getattr(endpoint.mpi, _OPS[call.op])
    # 16-bit floats travel as 32-bit ones. A copy anyway, but for all-reduce: MPI must not write to the inputs.
    own = make_dense(call.tensor)
    own = own.float() if own.dtype in HALVES else own
    if own.dtype not in _TYPES:
        raise UsageError(f"MPI cannot reduce this type (type: {own.dtype}); convert the tensor")
    target = call.output if isinstance(call, calls.ReduceScatter) else call.tensor
    total, is_target = own, True
    match call:
        case calls.AllReduce():
            request = comm.Iallreduce(endpoint.mpi.IN_PLACE, endpoint.numbers_of(total), op)
        case calls.Reduce():
            total, is_target = torch.empty_like(own), endpoint.rank == call.root
            request = comm.Ireduce(
                endpoint.numbers_of(own), endpoint.numbers_of(total) if is_target else None, op, root=call.root
            )
        case calls.ReduceScatter():
            total = own.new_empty(call.output.numel())
            source, sink = endpoint.numbers_of(own), endpoint.numbers_of(total)
            if call.sizes is None:
                request = comm.Ireduce_scatter_block(source, sink, op)
            else:
                request = comm.Ireduce_scatter(source, sink, list(part_lengths(call.tensor, call.sizes)), op)

    def finish() -> None:
        if is_target:
            if call.op == "mean":
                total.div_(endpoint.size)
            copy_back(target, total)

    return StartedCall([request], finish, (own,))


def _start_neighbour_all_reduce(endpoint: MpiEndpoint, call: calls.NeighbourAllReduce) -> StartedCall:
    sources, weights, comm = call.graph[endpoint.rank], call.weights[endpoint.rank], endpoint.neighbours
    own = make_dense(call.tensor)
    others = own.new_empty((len(sources), own.numel()))
    sent = endpoint.bytes_of(own)
    requests = [comm.Irecv(endpoint.bytes_of(other), source) for other, source in zip(others, sources, strict=True)]
    requests += [comm.Isend(sent, peer) for peer, row in enumerate(call.graph) if endpoint.rank in row]

    def finish() -> None:
        combine_neighbours(own, others, weights)
        copy_back(call.tensor, own)

    return StartedCall(requests, finish, (sent,))

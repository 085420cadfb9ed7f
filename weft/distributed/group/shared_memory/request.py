"""A call in the terms of the engine: addresses, counts, codes. Pure: nothing is moved but into contiguous copies."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, Graph, ReduceOp
from weft.errors import UsageError

__all__ = ["Place", "Request", "lower"]

# The numbers are those of collectives.h and reduce.h.
SEND, RECV, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST = range(7)
REDUCE, GATHER, SCATTER, NEIGHBOUR_ALL_GATHER, NEIGHBOUR_ALL_REDUCE, BARRIER = range(7, 13)

TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 5,
}
BYTES = TYPES[torch.uint8]
OPS = {"sum": 0, "mean": 1, "min": 2, "max": 3, "product": 4}
# Truth values: any of them for a sum, all of them for a product.
BOOL_OPS = {"sum": OPS["max"], "max": OPS["max"], "min": OPS["min"], "product": OPS["min"]}


_REDUCTIONS = {
    (dtype, op): (type_, code)
    for dtype, type_ in TYPES.items()
    for op, code in (BOOL_OPS if dtype == torch.bool else OPS).items()
    if op != "mean" or dtype.is_floating_point
}


class Request(NamedTuple):
    """What the engine is given. `back` is a strided tensor to which `target` is copied when the call is done."""

    kind: int
    source: Tensor | None = None
    target: Tensor | None = None
    length: int = 0  # elements of one part
    width: int = 1  # bytes of an element
    type: int = BYTES
    op: int = 0
    root: int = 0
    tag: int = 0
    neighbours: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    back: Tensor | None = None


class Place(NamedTuple):
    """The rank that makes the call, and the size of its group."""

    rank: int
    size: int


def lower(call: Call, place: Place) -> Request:
    """The request of a call, checked as far as one rank can."""
    return _LOWER[type(call)](call, place)


def _all_reduce(call: calls.AllReduce, place: Place) -> Request:
    tensor = call.tensor
    type_, op = _reduction(tensor, call.op)
    if tensor.is_contiguous() and tensor.is_cpu:
        return Request(ALL_REDUCE, tensor, tensor, tensor.numel(), tensor.element_size(), type_, op)
    inner = _dense(tensor)
    return Request(ALL_REDUCE, inner, inner, inner.numel(), inner.element_size(), type_, op, back=tensor)


def _reduce(call: calls.Reduce, place: Place) -> Request:
    type_, op = _reduction(call.tensor, call.op)
    _check_rank(call.root, place, "root")
    inner = _dense(call.tensor)
    back = call.tensor if inner is not call.tensor and place.rank == call.root else None
    return Request(REDUCE, inner, inner, inner.numel(), inner.element_size(), type_, op, call.root, back=back)


def _reduce_scatter(call: calls.ReduceScatter, place: Place) -> Request:
    type_, op = _reduction(call.tensor, call.op)
    _check_parts(call.tensor, call.output, place.size)
    target, back = _target(call.output)
    count, width = call.output.numel(), call.output.element_size()
    return Request(REDUCE_SCATTER, _dense(call.tensor), target, count, width, type_, op, back=back)


def _all_gather(call: calls.AllGather, place: Place) -> Request:
    _check_parts(call.output, call.tensor, place.size)
    target, back = _target(call.output)
    return Request(ALL_GATHER, _dense(call.tensor), target, _num_bytes(call.tensor), back=back)


def _all_to_all(call: calls.AllToAll, place: Place) -> Request:
    _check_parts(call.tensor, call.output, 1)
    if call.tensor.numel() % place.size:
        raise UsageError(f"tensor has no equal parts (elements: {call.tensor.numel()}, ranks: {place.size}); pad it")
    target, back = _target(call.output)
    return Request(ALL_TO_ALL, _dense(call.tensor), target, _num_bytes(call.tensor) // place.size, back=back)


def _broadcast(call: calls.Broadcast, place: Place) -> Request:
    _check_rank(call.root, place, "root")
    inner = _dense(call.tensor)
    back = call.tensor if inner is not call.tensor and place.rank != call.root else None
    return Request(BROADCAST, inner, inner, _num_bytes(inner), root=call.root, back=back)


def _gather(call: calls.Gather, place: Place) -> Request:
    _check_rank(call.root, place, "root")
    target, back = None, None
    if place.rank == call.root:
        if call.output is None:
            raise UsageError(f"gather needs an output at its root (rank: {place.rank}); give one")
        _check_parts(call.output, call.tensor, place.size)
        target, back = _target(call.output)
    return Request(GATHER, _dense(call.tensor), target, _num_bytes(call.tensor), root=call.root, back=back)


def _scatter(call: calls.Scatter, place: Place) -> Request:
    _check_rank(call.root, place, "root")
    source = None
    if place.rank == call.root:
        if call.tensor is None:
            raise UsageError(f"scatter needs a tensor at its root (rank: {place.rank}); give one")
        _check_parts(call.tensor, call.output, place.size)
        source = _dense(call.tensor)
    target, back = _target(call.output)
    return Request(SCATTER, source, target, _num_bytes(call.output), root=call.root, back=back)


def _neighbour_all_gather(call: calls.NeighbourAllGather, place: Place) -> Request:
    row = _neighbours(call.graph, place)
    _check_parts(call.output, call.tensor, len(row))
    target, back = _target(call.output)
    source = _dense(call.tensor)
    return Request(NEIGHBOUR_ALL_GATHER, source, target, _num_bytes(call.tensor), neighbours=row, back=back)


def _neighbour_all_reduce(call: calls.NeighbourAllReduce, place: Place) -> Request:
    tensor, row, weights = call.tensor, _neighbours(call.graph, place), call.weights[place.rank]
    if not tensor.is_floating_point():
        raise UsageError(f"a weighted sum needs floating-point numbers (type: {tensor.dtype}); convert the tensor")
    if len(weights) != len(row) + 1:
        raise UsageError(f"weights do not fit the graph (weights: {len(weights)}, neighbours: {len(row)}, own: 1)")
    inner = _dense(tensor)
    back = None if inner is tensor else tensor
    type_ = TYPES[tensor.dtype]
    return Request(
        NEIGHBOUR_ALL_REDUCE, inner, inner, inner.numel(), inner.element_size(), type_, 0, 0, 0, row, weights, back
    )


def _send(call: calls.Send, place: Place) -> Request:
    _check_rank(call.peer, place, "peer")
    return Request(SEND, _dense(call.tensor), None, _num_bytes(call.tensor), root=call.peer, tag=call.tag)


def _recv(call: calls.Recv, place: Place) -> Request:
    _check_rank(call.peer, place, "peer")
    target, back = _target(call.tensor)
    return Request(RECV, None, target, _num_bytes(call.tensor), root=call.peer, tag=call.tag, back=back)


def _barrier(call: calls.Barrier, place: Place) -> Request:
    return Request(BARRIER)


_LOWER: dict[type, Callable[[Any, Place], Request]] = {
    calls.AllGather: _all_gather,
    calls.AllReduce: _all_reduce,
    calls.AllToAll: _all_to_all,
    calls.Barrier: _barrier,
    calls.Broadcast: _broadcast,
    calls.Gather: _gather,
    calls.NeighbourAllGather: _neighbour_all_gather,
    calls.NeighbourAllReduce: _neighbour_all_reduce,
    calls.Recv: _recv,
    calls.Reduce: _reduce,
    calls.ReduceScatter: _reduce_scatter,
    calls.Scatter: _scatter,
    calls.Send: _send,
}


def _dense(tensor: Tensor) -> Tensor:
    """The tensor itself where it lies in one piece, else a copy that does."""
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise UsageError(
            f"shared memory carries dense tensors of the CPU (device: {tensor.device}, layout: {tensor.layout}); "
            "move the tensor there"
        )
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _target(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    inner = _dense(tensor)
    return inner, None if inner is tensor else tensor


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reduction(tensor: Tensor, op: ReduceOp) -> tuple[int, int]:
    """The codes of its type and of the reduction: one look-up, as small calls are counted in microseconds."""
    codes = _REDUCTIONS.get((tensor.dtype, op))
    if codes is not None:
        return codes
    if tensor.dtype in TYPES:
        raise UsageError(f"whole numbers have no mean of their own type (type: {tensor.dtype}); convert, or sum")
    raise UsageError(f"tensor cannot be reduced (type: {tensor.dtype}); convert it")


def _check_rank(rank: int, place: Place, role: str) -> None:
    if not 0 <= rank < place.size:
        raise UsageError(f"there is no such rank ({role}: {rank}, size of the group: {place.size})")


def _check_parts(whole: Tensor, part: Tensor, num_parts: int) -> None:
    if whole.numel() != part.numel() * num_parts or whole.dtype != part.dtype:
        raise UsageError(
            f"tensors do not fit ({tuple(whole.shape)} of {whole.dtype} is not {num_parts} times "
            f"{tuple(part.shape)} of {part.dtype}); give matching shapes and types"
        )


def _neighbours(graph: Graph, place: Place) -> tuple[int, ...]:
    if len(graph) != place.size:
        raise UsageError(f"graph does not fit the group (rows: {len(graph)}, ranks: {place.size}); give a row per rank")
    for peer in graph[place.rank]:
        _check_rank(peer, place, "neighbour")
    return graph[place.rank]

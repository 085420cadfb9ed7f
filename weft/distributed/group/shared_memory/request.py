"""A call in the terms of the engine: addresses, counts, codes. Pure: nothing is moved but into contiguous copies."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, ReduceOp
from weft.distributed.group.checks import check_call
from weft.distributed.group.dense import part_bytes, part_lengths
from weft.errors import UsageError

__all__ = ["ANY", "Request", "make_recv_any", "make_request"]

# The numbers are those of collectives.h and reduce.h.
SEND, RECV, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST = range(7)
REDUCE, NEIGHBOUR_ALL_REDUCE, BARRIER = range(7, 10)

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
ANY = -1  # the peer of a receive from whoever sends first
BYTES = TYPES[torch.uint8]
_STRIDED = torch.strided
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
    """A call as the engine takes it. `back` is a strided tensor to which `target` is copied when the call is done."""

    kind: int
    source: Tensor | None = None
    target: Tensor | None = None
    length: int = 0  # elements of one part; of this rank's, where parts differ
    width: int = 1  # bytes of an element
    type: int = BYTES
    op: int = 0
    root: int = 0
    tag: int = 0
    numbers: tuple[int, ...] = ()  # neighbours; or elements of each rank's part, of an all-to-all sent and received
    weights: tuple[float, ...] = ()
    back: Tensor | None = None


def make_request(call: Call, rank: int, size: int) -> Request:
    """The request of a call, checked as far as one rank can."""
    return _REQUESTS[type(call)](call, rank, size)


def _all_reduce(call: calls.AllReduce, rank: int, size: int) -> Request:
    tensor = call.tensor
    type_, op = _reduction(tensor, call.op)
    if tensor.is_contiguous() and tensor.is_cpu:
        return Request(ALL_REDUCE, tensor, tensor, tensor.numel(), tensor.element_size(), type_, op)
    inner = _dense(tensor)
    return Request(ALL_REDUCE, inner, inner, inner.numel(), inner.element_size(), type_, op, back=tensor)


def _reduce(call: calls.Reduce, rank: int, size: int) -> Request:
    check_call(call, rank, size)
    type_, op = _reduction(call.tensor, call.op)
    inner = _dense(call.tensor)
    back = call.tensor if inner is not call.tensor and rank == call.root else None
    return Request(REDUCE, inner, inner, inner.numel(), inner.element_size(), type_, op, call.root, back=back)


def _reduce_scatter(call: calls.ReduceScatter, rank: int, size: int) -> Request:
    check_call(call, rank, size)
    type_, op = _reduction(call.tensor, call.op)
    target, back = _target(call.output)
    count, width = call.output.numel(), call.output.element_size()
    lengths = () if call.sizes is None else part_lengths(call.tensor, call.sizes)
    return Request(REDUCE_SCATTER, _dense(call.tensor), target, count, width, type_, op, numbers=lengths, back=back)


def _all_gather(call: calls.AllGather, rank: int, size: int) -> Request:
    check_call(call, rank, size)
    target, back = _target(call.output)
    lengths = () if call.sizes is None else part_bytes(call.output, call.sizes)
    return Request(ALL_GATHER, _dense(call.tensor), target, call.tensor.nbytes, numbers=lengths, back=back)


def _all_to_all(call: calls.AllToAll, rank: int, size: int) -> Request:
    check_call(call, rank, size)
    target, back = _target(call.output)
    lengths: tuple[int, ...] = ()
    if call.send_sizes is not None and call.recv_sizes is not None:
        lengths = part_bytes(call.tensor, call.send_sizes) + part_bytes(call.output, call.recv_sizes)
    return Request(ALL_TO_ALL, _dense(call.tensor), target, call.tensor.nbytes // size, numbers=lengths, back=back)


def _broadcast(call: calls.Broadcast, rank: int, size: int) -> Request:
    check_call(call, rank, size)
    inner = _dense(call.tensor)
    back = call.tensor if inner is not call.tensor and rank != call.root else None
    return Request(BROADCAST, inner, inner, inner.nbytes, root=call.root, back=back)


def _neighbour_all_reduce(call: calls.NeighbourAllReduce, rank: int, size: int) -> Request:
    check_call(call, rank, size)
    inner, back = _target(call.tensor)
    type_, _ = _reduction(call.tensor, "sum")
    return Request(
        NEIGHBOUR_ALL_REDUCE,
        inner,
        inner,
        inner.numel(),
        inner.element_size(),
        type_,
        numbers=call.graph[rank],
        weights=call.weights[rank],
        back=back,
    )


# Messages may also go to the rank itself, and under tags below 0: torch's gathers, scatters and lists of parts do.
def _send(call: calls.Send, rank: int, size: int) -> Request:
    _check_peer(call.peer, size)
    return Request(SEND, _dense(call.tensor), None, call.tensor.nbytes, root=call.peer, tag=call.tag)


def _recv(call: calls.Recv, rank: int, size: int) -> Request:
    _check_peer(call.peer, size)
    target, back = _target(call.tensor)
    return Request(RECV, None, target, call.tensor.nbytes, root=call.peer, tag=call.tag, back=back)


def make_recv_any(tensor: Tensor, tag: int) -> Request:
    """The request of a receive from any rank."""
    target, back = _target(tensor)
    return Request(RECV, None, target, tensor.nbytes, root=ANY, tag=tag, back=back)


def _barrier(call: calls.Barrier, rank: int, size: int) -> Request:
    return Request(BARRIER)


_REQUESTS: dict[type, Callable[[Any, int, int], Request]] = {
    calls.AllGather: _all_gather,
    calls.AllReduce: _all_reduce,
    calls.AllToAll: _all_to_all,
    calls.Barrier: _barrier,
    calls.Broadcast: _broadcast,
    calls.NeighbourAllReduce: _neighbour_all_reduce,
    calls.Recv: _recv,
    calls.Reduce: _reduce,
    calls.ReduceScatter: _reduce_scatter,
    calls.Send: _send,
}


def _dense(tensor: Tensor) -> Tensor:
    """The tensor itself where it lies in one piece, else a copy that does."""
    if not tensor.is_cpu or tensor.layout is not _STRIDED:
        raise UsageError(
            f"shared memory carries dense tensors of the CPU (device: {tensor.device}, layout: {tensor.layout}); "
            "move the tensor there"
        )
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _target(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    inner = _dense(tensor)
    return inner, None if inner is tensor else tensor


def _reduction(tensor: Tensor, op: ReduceOp) -> tuple[int, int]:
    """The codes of its type and of the reduction: one look-up, as small calls are counted in microseconds."""
    codes = _REDUCTIONS.get((tensor.dtype, op))
    if codes is not None:
        return codes
    if tensor.dtype in TYPES:
        raise UsageError(f"whole numbers have no mean of their own type (type: {tensor.dtype}); convert, or sum")
    raise UsageError(f"tensor cannot be reduced (type: {tensor.dtype}); convert it")


def _check_peer(peer: int, size: int) -> None:
    if not 0 <= peer < size:
        raise UsageError(f"peer is not in the group (peer: {peer}, size: {size}); use 0 to {size - 1}")

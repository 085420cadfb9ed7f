"""Calls in the terms of a torch.distributed process group: dense tensors, bytes wherever nothing is added up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, ReduceOp, Sizes
from weft.distributed.group.dense import (
    as_bytes,
    combine_neighbours,
    copy_back,
    make_dense,
    part_bytes,
    part_lengths,
    reduce_parts,
)
from weft.errors import UsageError

__all__ = ["StartedCall", "TorchEndpoint", "start_call"]

# The type stubs of torch know neither the options of calls nor the methods of process groups.
_c10d: Any = distributed_c10d

_OPS: dict[ReduceOp, Any] = {
    "sum": _c10d.ReduceOp.SUM,
    "mean": _c10d.ReduceOp.SUM,
    "min": _c10d.ReduceOp.MIN,
    "max": _c10d.ReduceOp.MAX,
    "product": _c10d.ReduceOp.PRODUCT,
}
_REDUCIBLE = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class StartedCall:
    """The works of a call under way, and what is left to do when all of them are done."""

    works: list[Any]
    finish: Callable[[], None] = _nothing
    is_message: bool = False  # sends and receives: Gloo can wait for them, but cannot tell whether they are done


@dataclass(frozen=True, slots=True)
class TorchEndpoint:
    """A rank and its process group."""

    transport: Any
    rank: int
    size: int

    def send(self, tensor: Tensor, peer: int, tag: int) -> list[Any]:
        return [self.transport.send([as_bytes(make_dense(tensor))], peer, tag)] if tensor.numel() else []

    def recv(self, dense: Tensor, peer: int, tag: int) -> list[Any]:
        return [self.transport.recv([as_bytes(dense)], peer, tag)] if dense.numel() else []


def start_call(endpoint: TorchEndpoint, call: Call, neighbour_tag: int) -> StartedCall:
    """Start a call that `check_call` has passed. Nothing is sent where all ranks know that there is nothing."""
    match call:
        case calls.Barrier():
            return StartedCall([endpoint.transport.barrier(_c10d.BarrierOptions())])
        case calls.Send():
            return StartedCall(endpoint.send(call.tensor, call.peer, call.tag), is_message=True)
        case calls.Recv():
            dense = make_dense(call.tensor)
            works = endpoint.recv(dense, call.peer, call.tag)
            return StartedCall(works, lambda: copy_back(call.tensor, dense), is_message=True)
        case calls.NeighbourAllReduce():
            return _start_neighbour_all_reduce(endpoint, call, neighbour_tag)
        case calls.AllToAll() if call.send_sizes is not None:
            return _start_exchange(endpoint, call)  # a rank that sends nothing may yet receive
        case calls.AllGather() if call.sizes is not None and len(set(call.sizes)) > 1:
            return _start_broadcasts(endpoint, call, call.sizes)
        case _ if call.tensor.numel() == 0:
            return StartedCall([])
        case calls.AllReduce() | calls.Reduce():
            return _start_reduction(endpoint, call)
        case calls.ReduceScatter():
            return _start_reduce_scatter(endpoint, call)
        case calls.AllGather() | calls.AllToAll():
            return _start_exchange(endpoint, call)
        case calls.Broadcast():
            dense = make_dense(call.tensor)
            return StartedCall([_broadcast(endpoint, dense, call.root)], lambda: copy_back(call.tensor, dense))


def _start_reduction(endpoint: TorchEndpoint, call: calls.AllReduce | calls.Reduce) -> StartedCall:
    if call.tensor.dtype not in _REDUCIBLE:
        raise UsageError(f"torch.distributed cannot reduce this type (type: {call.tensor.dtype}); convert the tensor")
    dense = make_dense(call.tensor)
    if isinstance(call, calls.AllReduce):
        work = endpoint.transport.allreduce([dense], _options(_c10d.AllreduceOptions(), reduceOp=_OPS[call.op]))
    else:
        dense = dense.clone()  # Gloo uses the tensors of all ranks as scratch
        options = _options(_c10d.ReduceOptions(), reduceOp=_OPS[call.op], rootRank=call.root)
        work = endpoint.transport.reduce([dense], options)

    def finish() -> None:
        if isinstance(call, calls.AllReduce) or endpoint.rank == call.root:
            if call.op == "mean":
                dense.div_(endpoint.size)
            copy_back(call.tensor, dense)

    return StartedCall([work], finish)


def _start_reduce_scatter(endpoint: TorchEndpoint, call: calls.ReduceScatter) -> StartedCall:
    """Each rank gets all parts that it is to reduce: as few bytes as a ring, and the order of ranks."""
    parts = call.tensor.detach().new_empty((endpoint.size, call.output.numel()))
    sent = [] if call.sizes is None else list(part_bytes(call.tensor, call.sizes))
    received = [] if call.sizes is None else [call.output.nbytes] * endpoint.size
    work = _exchange_parts(endpoint, parts.view(-1), make_dense(call.tensor), received, sent)
    return StartedCall([work], lambda: copy_back(call.output, reduce_parts(parts, call.op)))


def _start_exchange(endpoint: TorchEndpoint, call: calls.AllGather | calls.AllToAll) -> StartedCall:
    dense, output = make_dense(call.tensor), make_dense(call.output)
    if isinstance(call, calls.AllToAll):
        sent = [] if call.send_sizes is None else list(part_bytes(call.tensor, call.send_sizes))
        received = [] if call.recv_sizes is None else list(part_bytes(call.output, call.recv_sizes))
        work = _exchange_parts(endpoint, output, dense, received, sent)
    else:
        work = endpoint.transport._allgather_base(as_bytes(output), as_bytes(dense), _c10d.AllgatherOptions())
    return StartedCall([work], lambda: copy_back(call.output, output))


def _start_broadcasts(endpoint: TorchEndpoint, call: calls.AllGather, sizes: Sizes) -> StartedCall:
    """Gloo gathers equal parts alone, and NCCL itself gathers unequal ones so: each rank broadcasts its part."""
    output = make_dense(call.output)
    parts = output.split(part_lengths(call.output, sizes))
    copy_back(parts[endpoint.rank], make_dense(call.tensor))
    works = [_broadcast(endpoint, part, root) for root, part in enumerate(parts) if part.numel()]
    return StartedCall(works, lambda: copy_back(call.output, output))


def _broadcast(endpoint: TorchEndpoint, dense: Tensor, root: int) -> Any:
    return endpoint.transport.broadcast([as_bytes(dense)], _options(_c10d.BroadcastOptions(), rootRank=root))


def _exchange_parts(
    endpoint: TorchEndpoint, output: Tensor, dense: Tensor, received: list[int], sent: list[int]
) -> Any:
    """Bytes of the parts; none of them where the parts are equal."""
    options = _c10d.AllToAllOptions()
    return endpoint.transport.alltoall_base(as_bytes(output), as_bytes(dense), received, sent, options)


def _start_neighbour_all_reduce(endpoint: TorchEndpoint, call: calls.NeighbourAllReduce, tag: int) -> StartedCall:
    sources, weights, own = call.graph[endpoint.rank], call.weights[endpoint.rank], make_dense(call.tensor)
    others = own.new_empty((len(sources), own.numel()))
    targets = [peer for peer, row in enumerate(call.graph) if endpoint.rank in row]
    works = [work for other, source in zip(others, sources, strict=True) for work in endpoint.recv(other, source, tag)]
    works += [work for target in targets for work in endpoint.send(own, target, tag)]

    def finish() -> None:
        combine_neighbours(own, others, weights)
        copy_back(call.tensor, own)

    return StartedCall(works, finish, is_message=True)


def _options(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options

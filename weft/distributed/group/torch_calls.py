"""Calls in the terms of a torch.distributed process group: dense tensors, bytes wherever nothing is added up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, Graph, ReduceOp
from weft.distributed.group.dense import as_bytes, combine_neighbours, copy_back, make_dense, reduce_parts
from weft.errors import UsageError

__all__ = ["Launched", "TorchSeat", "launch"]

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
class Launched:
    """What is under way for a call, and what is left to do when all of it is done."""

    works: list[Any]
    finish: Callable[[], None] = _nothing
    is_message: bool = False  # sends and receives: Gloo can wait for them, but cannot tell whether they are done


@dataclass(frozen=True, slots=True)
class TorchSeat:
    """A rank at its process group."""

    transport: Any
    rank: int
    size: int

    def send(self, tensor: Tensor, peer: int, tag: int) -> list[Any]:
        return [self.transport.send([as_bytes(make_dense(tensor))], peer, tag)] if tensor.numel() else []

    def recv(self, dense: Tensor, peer: int, tag: int) -> list[Any]:
        return [self.transport.recv([as_bytes(dense)], peer, tag)] if dense.numel() else []


def launch(seat: TorchSeat, call: Call, neighbour_tag: int) -> Launched:
    """Start a call that `check_call` has passed. Ranks agree on emptiness, so nothing is sent for empty tensors."""
    match call:
        case calls.Barrier():
            return Launched([seat.transport.barrier(_c10d.BarrierOptions())])
        case calls.Send():
            return Launched(seat.send(call.tensor, call.peer, call.tag), is_message=True)
        case calls.Recv():
            dense = make_dense(call.tensor)
            works = seat.recv(dense, call.peer, call.tag)
            return Launched(works, lambda: copy_back(call.tensor, dense), is_message=True)
        case calls.NeighbourAllGather():
            return _launch_neighbour_all_gather(seat, call, neighbour_tag)
        case calls.NeighbourAllReduce():
            return _launch_neighbour_all_reduce(seat, call, neighbour_tag)
        case calls.Scatter():
            return _launch_scatter(seat, call) if call.output.numel() else Launched([])
        case _ if call.tensor.numel() == 0:
            return Launched([])
        case calls.AllReduce() | calls.Reduce():
            return _launch_reduction(seat, call)
        case calls.ReduceScatter():
            return _launch_reduce_scatter(seat, call)
        case calls.AllGather() | calls.AllToAll():
            return _launch_exchange(seat, call)
        case calls.Gather():
            return _launch_gather(seat, call)
        case calls.Broadcast():
            dense = make_dense(call.tensor)
            work = seat.transport.broadcast([as_bytes(dense)], _options(_c10d.BroadcastOptions(), rootRank=call.root))
            return Launched([work], lambda: copy_back(call.tensor, dense))


def _launch_reduction(seat: TorchSeat, call: calls.AllReduce | calls.Reduce) -> Launched:
    if call.tensor.dtype not in _REDUCIBLE:
        raise UsageError(f"torch.distributed cannot reduce this type (type: {call.tensor.dtype}); convert the tensor")
    dense = make_dense(call.tensor)
    if isinstance(call, calls.AllReduce):
        work = seat.transport.allreduce([dense], _options(_c10d.AllreduceOptions(), reduceOp=_OPS[call.op]))
    else:
        dense = dense.clone()  # Gloo uses the tensors of all ranks as scratch
        options = _options(_c10d.ReduceOptions(), reduceOp=_OPS[call.op], rootRank=call.root)
        work = seat.transport.reduce([dense], options)

    def finish() -> None:
        if isinstance(call, calls.AllReduce) or seat.rank == call.root:
            if call.op == "mean":
                dense.div_(seat.size)
            copy_back(call.tensor, dense)

    return Launched([work], finish)


def _launch_reduce_scatter(seat: TorchSeat, call: calls.ReduceScatter) -> Launched:
    """Each rank gets all parts that it is to reduce: as few bytes as a ring, and the order of ranks."""
    parts = call.tensor.detach().new_empty(call.tensor.numel())
    work = _exchange_parts(seat, parts, make_dense(call.tensor))
    return Launched([work], lambda: copy_back(call.output, reduce_parts(parts.view(seat.size, -1), call.op)))


def _launch_exchange(seat: TorchSeat, call: calls.AllGather | calls.AllToAll) -> Launched:
    dense, output = make_dense(call.tensor), make_dense(call.output)
    if isinstance(call, calls.AllToAll):
        work = _exchange_parts(seat, output, dense)
    else:
        work = seat.transport._allgather_base(as_bytes(output), as_bytes(dense), _c10d.AllgatherOptions())
    return Launched([work], lambda: copy_back(call.output, output))


def _exchange_parts(seat: TorchSeat, output: Tensor, dense: Tensor) -> Any:
    return seat.transport.alltoall_base(as_bytes(output), as_bytes(dense), [], [], _c10d.AllToAllOptions())


def _launch_gather(seat: TorchSeat, call: calls.Gather) -> Launched:
    options = _options(_c10d.GatherOptions(), rootRank=call.root)
    dense = as_bytes(make_dense(call.tensor))
    if seat.rank != call.root or call.output is None:
        return Launched([seat.transport.gather([], [dense], options)])
    target, output = call.output, make_dense(call.output)
    work = seat.transport.gather([list(as_bytes(output).chunk(seat.size))], [dense], options)
    return Launched([work], lambda: copy_back(target, output))


def _launch_scatter(seat: TorchSeat, call: calls.Scatter) -> Launched:
    output, parts = make_dense(call.output), []
    if seat.rank == call.root and call.tensor is not None:
        parts = [list(as_bytes(make_dense(call.tensor)).chunk(seat.size))]
    work = seat.transport.scatter([as_bytes(output)], parts, _options(_c10d.ScatterOptions(), rootRank=call.root))
    return Launched([work], lambda: copy_back(call.output, output))


def _launch_neighbour_all_gather(seat: TorchSeat, call: calls.NeighbourAllGather, tag: int) -> Launched:
    output = make_dense(call.output)
    works = _exchange_with_neighbours(seat, call.tensor, output, call.graph, tag)
    return Launched(works, lambda: copy_back(call.output, output), is_message=True)


def _launch_neighbour_all_reduce(seat: TorchSeat, call: calls.NeighbourAllReduce, tag: int) -> Launched:
    weights = call.weights[seat.rank]
    own = make_dense(call.tensor)
    others = own.new_empty((len(weights) - 1, own.numel()))

    def finish() -> None:
        combine_neighbours(own, others, weights)
        copy_back(call.tensor, own)

    works = _exchange_with_neighbours(seat, own, others.view(-1), call.graph, tag)
    return Launched(works, finish, is_message=True)


def _exchange_with_neighbours(seat: TorchSeat, tensor: Tensor, received: Tensor, graph: Graph, tag: int) -> list[Any]:
    sources = graph[seat.rank]
    parts = received.view(len(sources), -1) if sources else received
    targets = [peer for peer, row in enumerate(graph) if seat.rank in row]
    receives = [work for part, source in zip(parts, sources, strict=False) for work in seat.recv(part, source, tag)]
    return receives + [work for target in targets for work in seat.send(tensor, target, tag)]


def _options(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options

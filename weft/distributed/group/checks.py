"""Checks of a call before anything is sent."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, NeighbourGraph, Sizes
from weft.errors import UsageError

__all__ = ["check_call"]


def check_call(call: Call, rank: int, size: int) -> None:
    """Raise UsageError where ranks, sizes or types of a call do not fit this rank of a group of `size`."""
    check = _CHECKS.get(type(call))
    if check is not None:
        check(call, rank, size)


def _check_message(call: calls.Send | calls.Recv, rank: int, size: int) -> None:
    if not 0 <= call.peer < size:
        raise UsageError(f"peer is not in the group (peer: {call.peer}, size: {size}); use 0 to {size - 1}")
    if call.peer == rank:
        raise UsageError(f"peer is this rank itself (peer: {call.peer}); copy the tensor instead")
    if call.tag < 0:
        raise UsageError(f"tag is negative (tag: {call.tag}); use 0 or more")


def _check_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise UsageError(f"root is not in the group (root: {root}, size: {size}); use 0 to {size - 1}")


def _check_op(tensor: Tensor, op: str) -> None:
    if op == "mean" and not tensor.is_floating_point():
        raise UsageError(f"mean needs floating-point numbers (type: {tensor.dtype}); use sum and divide yourself")


def _check_parts(whole: Tensor, part: Tensor, num_parts: int) -> None:
    if whole.dtype != part.dtype or whole.numel() != num_parts * part.numel():
        raise UsageError(
            f"tensor does not hold {num_parts} parts (whole: {tuple(whole.shape)} {whole.dtype}, "
            f"part: {tuple(part.shape)} {part.dtype}); make its first dimension {num_parts} times that of the part"
        )


def _check_sizes(whole: Tensor, sizes: Sizes, size: int) -> None:
    if len(sizes) != size:
        raise UsageError(f"sizes do not fit the group (sizes: {len(sizes)}, size: {size}); give one for each rank")
    if min(sizes) < 0:
        raise UsageError(f"size of a part is negative (sizes: {sizes}); use 0 or more")
    if whole.dim() == 0 or whole.shape[0] != sum(sizes):
        raise UsageError(
            f"sizes do not add up to the tensor (sum: {sum(sizes)}, shape: {tuple(whole.shape)}); "
            "make its first dimension their sum"
        )


def _check_own_part(whole: Tensor, part: Tensor, sizes: Sizes, rank: int, size: int) -> None:
    _check_sizes(whole, sizes, size)
    needed = (sizes[rank], *whole.shape[1:])
    if part.shape != needed or part.dtype != whole.dtype:
        raise UsageError(
            f"part does not have its size (rank: {rank}, part: {tuple(part.shape)} {part.dtype}, "
            f"needed: {needed} {whole.dtype}); give a part of that shape and type"
        )


def _check_graph(graph: NeighbourGraph, size: int) -> None:
    if len(graph) != size:
        raise UsageError(f"graph does not fit the group (ranks: {len(graph)}, size: {size}); list every rank once")
    for rank, sources in enumerate(graph):
        if len(set(sources)) != len(sources) or rank in sources or not all(0 <= s < size for s in sources):
            raise UsageError(
                f"neighbours are not other ranks of the group (rank: {rank}, neighbours: {sources}); "
                "list each source once"
            )


def _check_weights(call: calls.NeighbourAllReduce, rank: int, size: int) -> None:
    _check_graph(call.graph, size)
    counts = [len(sources) + 1 for sources in call.graph]
    if [len(row) for row in call.weights] != counts:
        raise UsageError(
            f"weights do not fit the graph (weights: {[len(row) for row in call.weights]}, needed: {counts}); "
            "give one for the rank itself and one for each neighbour"
        )
    if not call.tensor.is_floating_point():
        raise UsageError(f"weights need floating-point numbers (type: {call.tensor.dtype}); convert the tensor")


def _check_all_to_all(call: calls.AllToAll, rank: int, size: int) -> None:
    if call.send_sizes is not None or call.recv_sizes is not None:
        _check_uneven_all_to_all(call, rank, size)
        return
    _check_parts(call.output, call.tensor, 1)
    if call.tensor.numel() % size:
        raise UsageError(f"tensor does not divide into parts (shape: {tuple(call.tensor.shape)}, size: {size}); pad it")


def _check_uneven_all_to_all(call: calls.AllToAll, rank: int, size: int) -> None:
    if call.send_sizes is None or call.recv_sizes is None:
        raise UsageError(
            f"all-to-all lacks sizes (send_sizes: {call.send_sizes}, recv_sizes: {call.recv_sizes}); "
            "give both, or neither for equal parts"
        )
    _check_sizes(call.tensor, call.send_sizes, size)
    _check_sizes(call.output, call.recv_sizes, size)
    rows, own = (call.output.shape[1:], call.output.dtype), (call.tensor.shape[1:], call.tensor.dtype)
    if rows != own or call.send_sizes[rank] != call.recv_sizes[rank]:
        raise UsageError(
            f"what is sent cannot be received (sent: {tuple(own[0])} {own[1]} a row, received: {tuple(rows[0])} "
            f"{rows[1]}; rows to itself: {call.send_sizes[rank]} and {call.recv_sizes[rank]}); make them alike"
        )


def _check_all_gather(call: calls.AllGather, rank: int, size: int) -> None:
    if call.sizes is None:
        _check_parts(call.output, call.tensor, size)
    else:
        _check_own_part(call.output, call.tensor, call.sizes, rank, size)


def _check_reduce_scatter(call: calls.ReduceScatter, rank: int, size: int) -> None:
    _check_op(call.tensor, call.op)
    if call.sizes is None:
        _check_parts(call.tensor, call.output, size)
    else:
        _check_own_part(call.tensor, call.output, call.sizes, rank, size)


def _check_reduce(call: calls.Reduce, rank: int, size: int) -> None:
    _check_root(call.root, size)
    _check_op(call.tensor, call.op)


_CHECKS: dict[type, Callable[[Any, int, int], None]] = {
    calls.Send: _check_message,
    calls.Recv: _check_message,
    calls.AllReduce: lambda call, rank, size: _check_op(call.tensor, call.op),
    calls.ReduceScatter: _check_reduce_scatter,
    calls.AllGather: _check_all_gather,
    calls.AllToAll: _check_all_to_all,
    calls.Broadcast: lambda call, rank, size: _check_root(call.root, size),
    calls.Reduce: _check_reduce,
    calls.NeighbourAllReduce: _check_weights,
}

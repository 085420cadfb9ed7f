"""torch's process group over one of ours. The names and signatures are torch's: its C++ and Python code call them."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, ReduceOp, Sizes
from weft.distributed.group.dense import copy_back, make_dense
from weft.distributed.group.group import AbstractGroup
from weft.distributed.torch_backend.work import FutureResolver, WeftWork
from weft.errors import UsageError

__all__ = ["BACKEND", "WeftProcessGroup"]

BACKEND = "weft"
_PARTS = -1  # the tag of messages that stand for a gather, a scatter, or an all-to-all of lists

# torch's stubs list further overloads that nothing calls on a backend.
_ProcessGroup: Any = dist.ProcessGroup
_Combine = Callable[[Tensor, Tensor], Tensor]


@final
class WeftProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """torch's calls, translated. A dead peer raises weft.errors.PeerLostError out of `wait`."""

    def __init__(self, group: AbstractGroup) -> None:
        super().__init__(group.rank, group.size)
        self._group = group
        self._resolver = FutureResolver()
        self._group_name = self._group_desc = ""

    # --- who it is

    def name(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._group.rank

    def size(self) -> int:
        return self._group.size

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._group_desc = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    getBackendName, getRank, getSize = name, rank, size  # noqa: N815
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def shutdown(self) -> None:
        self._resolver.close()
        self._group.close()

    abort = shutdown

    # --- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        op = _any_op(opts)
        if not isinstance(op, str):
            return self._combine(tensors, op, targets=tensors)
        return self._start([calls.AllReduce(tensor, op) for tensor in tensors], tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        return self._start([calls.Broadcast(tensor, root) for tensor in tensors], tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        root, op = 0 if opts is None else opts.rootRank, _any_op(opts)
        if not isinstance(op, str):
            return self._combine(tensors, op, targets=tensors if self._group.rank == root else [])
        return self._start([calls.Reduce(tensor, root, op) for tensor in tensors], tensors, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._start([calls.Barrier()], [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._group.barrier()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._start([calls.AllGather(output, input)], [output], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._start([calls.AllGather(output, input) for output, input in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """One list of all ranks' parts for each input; the parts may differ in shape."""
        wholes = [parts[0].new_empty(sum(part.numel() for part in parts)) for parts in outputs]
        gathers = [
            calls.AllGather(whole, tensor.reshape(-1), _sizes(parts))
            for whole, tensor, parts in zip(wholes, inputs, outputs, strict=True)
        ]

        def hand_out() -> None:
            for whole, parts in zip(wholes, outputs, strict=True):
                _copy_parts(parts, whole)

        return self._start(gathers, [part for parts in outputs for part in parts], opts, hand_out)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """One list of the parts of all inputs for each rank."""
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._start([calls.ReduceScatter(output, input, _op(opts))], [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        op = _op(opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._start([calls.ReduceScatter(output, input, op) for output, input in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """One list of all ranks' parts for each output; the parts may differ in shape."""
        op, dense = _op(opts), [make_dense(output) for output in outputs]
        scatters = [
            calls.ReduceScatter(output, torch.cat([part.reshape(-1) for part in parts]), op, _sizes(parts))
            for output, parts in zip(dense, inputs, strict=True)
        ]

        def hand_out() -> None:
            for output, flat in zip(outputs, dense, strict=True):
                copy_back(output, flat)

        return self._start(scatters, outputs, opts, hand_out)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        parts = outputs[0] if self._group.rank == root else []
        recvs = [calls.Recv(part, peer, _PARTS) for peer, part in enumerate(parts)]
        return self._start([*recvs, calls.Send(inputs[0], root, _PARTS)], parts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        parts = inputs[0] if self._group.rank == root else []
        sends = [calls.Send(part, peer, _PARTS) for peer, part in enumerate(parts)]
        return self._start([calls.Recv(outputs[0], root, _PARTS), *sends], outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        if not output_sizes and not input_sizes:
            return self._start([calls.AllToAll(output, input)], [output])
        received, sent = (
            tuple(sizes) or (tensor.shape[0] // self._group.size,) * self._group.size
            for sizes, tensor in ((output_sizes, output), (input_sizes, input))
        )
        return self._start([calls.AllToAll(output, input, sent, received)], [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        sends = [calls.Send(tensor, peer, _PARTS) for peer, tensor in enumerate(inputs)]
        recvs = [calls.Recv(tensor, peer, _PARTS) for peer, tensor in enumerate(outputs)]
        return self._start([*recvs, *sends], outputs)

    # --- messages

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self._start([calls.Send(tensor, peer, tag) for tensor in tensors], tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self._start([calls.Recv(tensor, peer, tag) for tensor in tensors], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        raise UsageError("shared memory cannot receive from any source; name the rank to receive from")

    def _combine(self, tensors: list[Tensor], combine: _Combine, *, targets: list[Tensor]) -> dist.Work:
        """A reduction that groups do not have: all is gathered, and combined in the order of ranks."""
        wholes = [torch.empty((self._group.size, *tensor.shape), dtype=tensor.dtype) for tensor in tensors]
        gathers = [calls.AllGather(whole, tensor) for whole, tensor in zip(wholes, tensors, strict=True)]

        def finish() -> None:
            for target, whole in zip(targets, wholes, strict=False):
                target.copy_(reduce(combine, whole))

        return self._start(gathers, tensors, finish=finish)

    def _start(
        self,
        wanted: Sequence[Call],
        result: list[Tensor],
        opts: Any = None,
        finish: Callable[[], object] | None = None,
    ) -> dist.Work:
        if opts is not None and not opts.asyncOp and len(wanted) == 1:  # torch waits at once, so the short way will do
            self._group.run(wanted[0])
            return WeftWork((), result, self._resolver, finish)
        return WeftWork([self._group.start(call) for call in wanted], result, self._resolver, finish)


# By torch's inner enumeration: its reductions themselves are slow to compare. Its stubs do not know the members.
_NAMES: dict[str, ReduceOp | _Combine] = {
    "SUM": "sum",
    "AVG": "mean",
    "MIN": "min",
    "MAX": "max",
    "PRODUCT": "product",
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_OPS: dict[Any, ReduceOp | _Combine] = {getattr(dist.ReduceOp.RedOpType, name): op for name, op in _NAMES.items()}


def _any_op(opts: Any) -> ReduceOp | _Combine:
    """A reduction of groups, or a function of two tensors for one that they do not have."""
    if opts is None:
        return "sum"
    op = _OPS.get(opts.reduceOp.op)
    if op is None:
        raise _unknown(opts)
    return op


def _op(opts: Any) -> ReduceOp:
    op = _any_op(opts)
    if not isinstance(op, str):
        raise _unknown(opts)
    return op


def _unknown(opts: Any) -> UsageError:
    return UsageError(
        f"shared memory does not know this reduction ({opts.reduceOp.op}); use sum, avg, min, max or product"
    )


def _sizes(parts: Sequence[Tensor]) -> Sizes | None:
    """Elements of the parts; None where all are equal."""
    sizes = tuple(part.numel() for part in parts)
    return None if len(set(sizes)) == 1 else sizes


def _copy_parts(parts: Sequence[Tensor], whole: Tensor) -> None:
    for part, elements in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        part.copy_(elements.view(part.shape))

"""torch's process group over one of ours. The names and signatures are torch's: its C++ and Python code call them."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, Sizes
from weft.distributed.group.dense import copy_back, make_dense
from weft.distributed.group.shared_memory import SharedMemoryGroup
from weft.distributed.torch_backend.monitored_barrier import run_monitored_barrier
from weft.distributed.torch_backend.observers import Announcer, Record, count_modes, is_profiled
from weft.distributed.torch_backend.reductions import Combine, any_op_of, op_of
from weft.distributed.torch_backend.resolver import FutureResolver
from weft.distributed.torch_backend.sparse import all_reduce_sparse
from weft.distributed.torch_backend.work import WeftWork
from weft.errors import UsageError

__all__ = ["BACKEND", "WeftProcessGroup"]

BACKEND = "weft"
# Tags of messages that users do not send: those that stand for a gather, a scatter, or an all-to-all of lists; and
# from there down those of monitored barriers, one for each.
_PARTS, _BARRIERS = -1, -2

# torch's stubs list further overloads that nothing calls on a backend.
_ProcessGroup: Any = dist.ProcessGroup


@final
class WeftProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """torch's calls, translated. A dead peer raises weft.errors.PeerLostError out of `wait`."""

    def __init__(self, group: SharedMemoryGroup, store: Store, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)
        self._group, self._store, self._timeout = group, store, timeout
        self._resolver = FutureResolver()
        self._announcer = Announcer(group.rank, group.size)
        self._group_name = self._group_desc = ""
        self._num_calls = self._num_monitored = 0

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

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    def _set_sequence_number_for_group(self) -> None:
        self._num_calls = 0

    def get_group_store(self) -> Store:
        return self._store

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "WeftProcessGroup | None":
        """The group of these ranks, for those among them. A collective call; lists do not overlap."""
        is_member = self._group.rank in ranks
        part = self._group.split(min(ranks) if is_member else -1, ranks.index(self._group.rank) if is_member else 0)
        if not is_member:
            part.close()
            return None
        store = PrefixStore(f"split-{group_name or min(ranks)}/", self._store)
        split = WeftProcessGroup(part, store, timeout or self._timeout)
        split.setGroupName(group_name or f"{self._group_name}:split:{min(ranks)}")
        split.setGroupDesc(group_desc or f"{self._group_desc}:split")
        return split

    def shutdown(self) -> None:
        self._resolver.close()
        self._group.close()

    def abort(self) -> None:
        """End the calls under way, and leave."""
        self._group.close()
        self._resolver.close()

    # --- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        op = any_op_of(opts)
        if not isinstance(op, str):
            return self._combine("allreduce", (tensors, opts), tensors, op, targets=tensors)
        if tensors[0].is_sparse:
            return self._allreduce_sparse(tensors, opts)
        return self._start("allreduce", (tensors, opts), [calls.AllReduce(t, op) for t in tensors], tensors, opts)

    allreduce_coalesced = allreduce

    def _allreduce_sparse(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Done when it returns: the second step is known when the first is done."""
        if op_of(opts) != "sum":
            raise UsageError(f"sparse tensors have no reduction but the sum (op: {op_of(opts)}); make them dense")
        work = self._start("allreduce", (tensors, opts), [], tensors)
        for tensor in tensors:
            all_reduce_sparse(self._group, tensor)
        return work

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        return self._start("broadcast", (tensors, opts), [calls.Broadcast(t, root) for t in tensors], tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        root, op = 0 if opts is None else opts.rootRank, any_op_of(opts)
        if not isinstance(op, str):
            targets = tensors if self._group.rank == root else []
            return self._combine("reduce", (tensors, opts), tensors, op, targets=targets)
        return self._start("reduce", (tensors, opts), [calls.Reduce(t, root, op) for t in tensors], tensors, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        if opts is None or opts.timeout <= timedelta(0):
            return self._start("barrier", (opts,), [calls.Barrier()], [], opts)
        work = self._start("barrier", (opts,), [calls.Barrier()], [])
        work.timeout = opts.timeout
        return work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Raises DeadlineError, which on rank 0 names the ranks that did not come."""
        self._num_monitored += 1
        tag = _BARRIERS - self._num_monitored
        limit = self._timeout if timeout is None else timeout
        run_monitored_barrier(self._group, tag, limit, wait_all_ranks=wait_all_ranks)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        gather = calls.AllGather(output, input)
        return self._start("_allgather_base", (output, input, opts), [gather], [output], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        gathers = [calls.AllGather(output, input) for output, input in zip(outputs, inputs, strict=True)]
        return self._start("allgather_into_tensor_coalesced", (outputs, inputs, opts), gathers, outputs)

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

        result = [part for parts in outputs for part in parts]
        return self._start("allgather", (outputs, inputs, opts), gathers, result, opts, hand_out)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """One list of the parts of all inputs for each rank."""
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        scatter = calls.ReduceScatter(output, input, op_of(opts))
        return self._start("_reduce_scatter_base", (output, input, opts), [scatter], [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        op = op_of(opts)
        scatters = [calls.ReduceScatter(output, input, op) for output, input in zip(outputs, inputs, strict=True)]
        return self._start("reduce_scatter_tensor_coalesced", (outputs, inputs, opts), scatters, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """One list of all ranks' parts for each output; the parts may differ in shape."""
        op, dense = op_of(opts), [make_dense(output) for output in outputs]
        scatters = [
            calls.ReduceScatter(output, torch.cat([part.reshape(-1) for part in parts]), op, _sizes(parts))
            for output, parts in zip(dense, inputs, strict=True)
        ]

        def hand_out() -> None:
            for output, flat in zip(outputs, dense, strict=True):
                copy_back(output, flat)

        return self._start("reduce_scatter", (outputs, inputs, opts), scatters, outputs, opts, hand_out)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        parts = outputs[0] if self._group.rank == root else []
        recvs = [calls.Recv(part, peer, _PARTS) for peer, part in enumerate(parts)]
        return self._start("gather", (outputs, inputs, opts), [*recvs, calls.Send(inputs[0], root, _PARTS)], parts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        parts = inputs[0] if self._group.rank == root else []
        sends = [calls.Send(part, peer, _PARTS) for peer, part in enumerate(parts)]
        wanted: list[Call] = [calls.Recv(outputs[0], root, _PARTS), *sends]
        return self._start("scatter", (outputs, inputs, opts), wanted, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        sent: Sizes | None = None
        received: Sizes | None = None
        if output_sizes or input_sizes:
            received, sent = (
                tuple(sizes) or (tensor.shape[0] // self._group.size,) * self._group.size
                for sizes, tensor in ((output_sizes, output), (input_sizes, input))
            )
        arguments = (output, input, output_sizes, input_sizes, opts)
        return self._start("alltoall_base", arguments, [calls.AllToAll(output, input, sent, received)], [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        sends = [calls.Send(tensor, peer, _PARTS) for peer, tensor in enumerate(inputs)]
        recvs = [calls.Recv(tensor, peer, _PARTS) for peer, tensor in enumerate(outputs)]
        return self._start("alltoall", (outputs, inputs, opts), [*recvs, *sends], outputs)

    # --- messages

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self._start("send", (tensors, peer, tag), [calls.Send(t, peer, tag) for t in tensors], tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        sends = [calls.Recv(t, peer, tag) for t in tensors]
        return self._start("recv", (tensors, peer, tag), sends, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        if len(tensors) != 1:
            raise UsageError(f"one tensor is received from any source at a time (tensors: {len(tensors)})")
        record = self._watch("recv_anysource", (tensors, tag))
        received = self._group.start_recv_any(tensors[0], tag)
        work = WeftWork([received], tensors, self._resolver)
        work.source = lambda: received.source
        if record is not None:
            work.keep_record(record)
        return work

    def _combine(
        self, name: str, arguments: tuple[Any, ...], tensors: list[Tensor], combine: Combine, *, targets: list[Tensor]
    ) -> dist.Work:
        """A reduction that groups do not have: all is gathered, and combined in the order of ranks."""
        wholes = [torch.empty((self._group.size, *tensor.shape), dtype=tensor.dtype) for tensor in tensors]
        gathers = [calls.AllGather(whole, tensor) for whole, tensor in zip(wholes, tensors, strict=True)]

        def finish() -> None:
            for target, whole in zip(targets, wholes, strict=False):
                target.copy_(reduce(combine, whole))

        return self._start(name, arguments, gathers, tensors, finish=finish)

    def _start(
        self,
        name: str,
        arguments: tuple[Any, ...],
        wanted: Sequence[Call],
        result: list[Tensor],
        opts: Any = None,
        finish: Callable[[], object] | None = None,
    ) -> WeftWork:
        """The calls of one of torch's; its name and arguments are for those who watch. `opts` say that it is plain."""
        self._num_calls += 1
        record = None
        if count_modes() or is_profiled():
            record = self._watch(name, arguments)
        elif opts is not None and not opts.asyncOp and len(wanted) == 1:  # torch waits at once: the short way will do
            self._group.run(wanted[0])
            return WeftWork((), result, self._resolver, finish)
        work = WeftWork([self._group.start(call) for call in wanted], result, self._resolver, finish)
        if record is not None:
            work.keep_record(record)
        return work

    def _watch(self, name: str, arguments: tuple[Any, ...]) -> Record | None:
        if count_modes():
            self._announcer.announce(name, arguments)
        return Record(BACKEND, name, arguments) if is_profiled() else None


def _sizes(parts: Sequence[Tensor]) -> Sizes | None:
    """Elements of the parts; None where all are equal."""
    sizes = tuple(part.numel() for part in parts)
    return None if len(set(sizes)) == 1 else sizes


def _copy_parts(parts: Sequence[Tensor], whole: Tensor) -> None:
    for part, elements in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        part.copy_(elements.view(part.shape))

"""The shared-memory group as a torch.distributed backend, `backend="weft"`, which carries DDP, FSDP2 and DTensor.

The names and signatures are torch's: its C++ and Python code call these methods.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, ReduceOp
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.shared_memory import AbstractRendezvous, Invitation, SharedMemoryGroup
from weft.errors import UsageError

__all__ = ["BACKEND", "register"]

BACKEND = "weft"
_KEY = "shared-memory-segment"
_UNEVEN = -1  # the tag of messages that stand for an all-to-all of unequal parts


def register() -> None:
    """Make `backend="weft"` known to torch.distributed. May be called again."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _open, extended_api=True, devices=["cpu"])


def _open(options: Any, backend_options: Any) -> "WeftProcessGroup":
    del backend_options  # there are none
    timeout: timedelta = options.timeout
    group = SharedMemoryGroup(
        StoreRendezvous(options.store), options.group_rank, options.group_size, timeout=timeout.total_seconds()
    )
    return WeftProcessGroup(group)


@final
class StoreRendezvous(AbstractRendezvous):
    """Through the store that torch hands to a backend, which is new for every group."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def publish(self, invitation: Invitation) -> None:
        self._store.set(_KEY, str(invitation))

    def fetch(self, deadline: float) -> Invitation | None:
        try:
            self._store.wait([_KEY], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except dist.DistStoreError:
            return None
        return Invitation.parse(self._store.get(_KEY).decode())

    def withdraw(self) -> None:
        pass  # the store ends with the group


@final
class WeftWork(dist.Work):
    """One torch call, made of one or more of ours; `finish` puts results where torch wants them."""

    def __init__(
        self,
        works: Sequence[AbstractWork],
        result: list[Tensor],
        watcher: "_Watcher",
        finish: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._works, self._result, self._finish, self._watcher = works, result, finish, watcher
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            with self._lock:
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()
        return True

    def is_completed(self) -> bool:
        return all(work.is_done() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        with self._lock:
            first, self._future = self._future is None, self._future or torch.futures.Future()
        if first:
            self._watcher.watch(self)
        return self._future

    def resolve(self) -> None:
        """Called by the watcher: wait, then tell the future."""
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
        else:
            self._future.set_result(self._result)


@final
class _Watcher:
    """A thread that resolves futures, started by the first: torch's C++ side waits for those and not for works."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[WeftWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, work: WeftWork) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-futures", daemon=True)
            self._thread.start()
        self._works.put(work)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)
            thread.join()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.resolve()


# torch's stubs list further overloads that nothing calls on a backend.
_ProcessGroup: Any = dist.ProcessGroup


@final
class WeftProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """torch's calls, translated. A dead peer raises weft.errors.PeerLostError out of `wait`."""

    def __init__(self, group: AbstractGroup) -> None:
        super().__init__(group.rank, group.size)
        self._group = group
        self._watcher = _Watcher()
        self._group_name = self._group_desc = ""

    # --- who it is

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def getRank(self) -> int:  # noqa: N802
        return self._group.rank

    def getSize(self) -> int:  # noqa: N802
        return self._group.size

    def rank(self) -> int:
        return self._group.rank

    def size(self) -> int:
        return self._group.size

    def name(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._group_name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._group_desc = description

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

    def shutdown(self) -> None:
        self._watcher.close()
        self._group.close()

    def abort(self) -> None:
        self.shutdown()

    # --- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        op = _op(opts)
        return self._start([calls.AllReduce(tensor, op) for tensor in tensors], tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        return self._start([calls.Broadcast(tensor, root) for tensor in tensors], tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        return self._start([calls.Reduce(tensor, root, _op(opts)) for tensor in tensors], tensors, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._start([calls.Barrier()], [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._group.barrier()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._start([calls.AllGather(output, input)], [output], opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single(output, input, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._start([calls.AllGather(output, input) for output, input in pairs], outputs)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        wholes = [_stack(parts) for parts in outputs]
        gathers = [calls.AllGather(whole, tensor) for whole, tensor in zip(wholes, inputs, strict=True)]

        def hand_out() -> None:
            for whole, parts in zip(wholes, outputs, strict=True):
                _copy_parts(parts, whole)

        return self._start(gathers, [part for parts in outputs for part in parts], opts, hand_out)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._start([calls.ReduceScatter(output, input, _op(opts))], [output], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        op = _op(opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._start([calls.ReduceScatter(output, input, op) for output, input in pairs], outputs)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced(outputs, [torch.stack(parts) for parts in inputs], opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        if self._group.rank != root:
            return self._start([calls.Gather(inputs[0], None, root)], [])
        whole = _stack(outputs[0])
        gather = calls.Gather(inputs[0], whole, root)
        return self._start([gather], outputs[0], opts, lambda: _copy_parts(outputs[0], whole))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        source = torch.stack(inputs[0]) if self._group.rank == root else None
        return self._start([calls.Scatter(outputs[0], source, root)], outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        if not output_sizes and not input_sizes:
            return self._start([calls.AllToAll(output, input)], [output])
        rows = [sizes or [tensor.shape[0] // self._group.size] * self._group.size
                for sizes, tensor in ((output_sizes, output), (input_sizes, input))]  # fmt: skip
        return self._exchange(list(output.split(rows[0])), list(input.split(rows[1])), [output])

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        return self.all_to_all_single(output, input, output_sizes, input_sizes, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._exchange(outputs, inputs, outputs)

    # --- messages

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self._start([calls.Send(tensor, peer, tag) for tensor in tensors], tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self._start([calls.Recv(tensor, peer, tag) for tensor in tensors], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        raise UsageError("shared memory cannot receive from any source; name the rank to receive from")

    def _exchange(self, outputs: list[Tensor], inputs: list[Tensor], result: list[Tensor]) -> dist.Work:
        """Parts of any size, each to its rank."""
        sends = [calls.Send(tensor, peer, _UNEVEN) for peer, tensor in enumerate(inputs)]
        recvs = [calls.Recv(tensor, peer, _UNEVEN) for peer, tensor in enumerate(outputs)]
        return self._start([*recvs, *sends], result)

    def _start(
        self,
        wanted: Sequence[Call],
        result: list[Tensor],
        opts: Any = None,
        finish: Callable[[], object] | None = None,
    ) -> dist.Work:
        if opts is not None and not opts.asyncOp and len(wanted) == 1:  # torch waits at once, so the short way will do
            self._group.run(wanted[0])
            return WeftWork((), result, self._watcher, finish)
        return WeftWork([self._group.start(call) for call in wanted], result, self._watcher, finish)


# By torch's inner enumeration: its reductions themselves are slow to compare. Its stubs do not know the members.
_NAMES: dict[str, ReduceOp] = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max", "PRODUCT": "product"}
_OPS: dict[Any, ReduceOp] = {getattr(dist.ReduceOp.RedOpType, name): op for name, op in _NAMES.items()}


def _op(opts: Any) -> ReduceOp:
    if opts is None:
        return "sum"
    op = _OPS.get(opts.reduceOp.op)
    if op is None:
        raise UsageError(
            f"shared memory does not know this reduction ({opts.reduceOp.op}); use sum, avg, min, max or product"
        )
    return op


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Room for all parts, one after the other."""
    return torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)


def _copy_parts(parts: Sequence[Tensor], whole: Tensor) -> None:
    for part, row in zip(parts, whole, strict=True):
        part.copy_(row)
